"""Run torchrun, but report a failed worker in one line instead of torchrun's own traceback of forty.

The user's error is in the workers' output, and must not be pushed off the screen. It runs as a script, so that neither
this package nor the user's folder is on its path.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

gc.disable()  # as in launch_train.__main__: a tenth of the time of torch's import
# ruff: noqa: E402 - the collector is off before torch is imported
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

EXIT_FILE: Final = "LAUNCH_EXIT_FILE"
"""launch_train.common.contract.EXIT_FILE, which can't be imported here: workers that exit deliberately write their code
to it."""
FAULTS: Final = "LAUNCH_FAULTS"
"""launch_train.common.contract.FAULTS: workers record their uncaught exceptions there, and the node reports them."""

SHUTDOWN: Final = "--shutdown-timeout"

QUIET: Final = {
    "torch.distributed.elastic.multiprocessing.api": logging.CRITICAL,  # each failure and its consequences
    "torch.distributed.elastic.agent.server.api": logging.ERROR,  # a signal that the node has sent
}
"""torchrun's loggers and the levels from which they print. Below, their lines of up to 180 columns repeat what `main`
or the node reports."""

MEANINGS: Final = {
    "SIGKILL": "out of memory?",
    "SIGSEGV": "crash in native code",
    "SIGABRT": "abort in native code",
    "SIGBUS": "is /dev/shm full?",
    "SIGILL": "built for another CPU",
    "SIGFPE": "arithmetic error",
}


def main(argv: Sequence[str]) -> int:
    """Run torchrun. Returns 0, the exit code of the first worker that failed (128 + a signal's number), or 128 + the
    signal that ended torchrun itself."""
    gc.freeze()
    gc.enable()
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    _signal_ranks_alone()
    try:
        torchrun(_supported_arguments(argv, get_args_parser()))
    except ChildFailedError as error:
        for line in failure_lines(error, os.environ.get(EXIT_FILE, ""), os.environ.get(FAULTS, "")):
            print(f"launch: {line}", file=sys.stderr, flush=True)
        _, failed = error.get_first_failure()
        return failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _signal_ranks_alone() -> None:
    """Let torchrun send its signals to the ranks alone; the rest of their process groups is killed after their exit.

    A rank that saves needs its DataLoader workers for the rest of its step, and they die of SIGTERM. torch signals a
    rank's group since it starts each rank in its own session. Before that (torch 2.1) no such group exists.
    """
    close_context = SubprocessContext._close

    def close(context: SubprocessContext, death_sig: signal.Signals, timeout: int = 30) -> None:
        running = [handler for handler in context.subprocess_handlers.values() if handler.proc.poll() is None]
        for handler in running:
            handler.close = partial(lambda rank, death_sig: rank.send_signal(death_sig), handler.proc)  # type: ignore[method-assign]  # of this instance
        close_context(context, death_sig, timeout)
        for handler in running:
            with suppress(ProcessLookupError):
                os.killpg(handler.proc.pid, signal.SIGKILL)

    SubprocessContext._close = close  # type: ignore[method-assign,assignment]  # `self` is called context


def _supported_arguments(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """Replace --shutdown-timeout for torch 2.11, which has it only as a method's default: the seconds until workers are
    killed."""
    if SHUTDOWN in parser._option_string_actions:
        return list(argv)
    index = next(index for index, word in enumerate(argv) if word.startswith(f"{SHUTDOWN}="))
    PContext.close.__defaults__ = (None, int(argv[index].partition("=")[2]))
    return [*argv[:index], *argv[index + 1 :]]


def failure_lines(error: ChildFailedError, exit_file: str, faults: str = "") -> Iterator[str]:
    """Yield what the output doesn't show: which rank failed first, and which signal killed it.

    Nothing about ranks that torchrun then ended, nor where a worker has reported its end (its code is in `exit_file`,
    or its exception in the folder `faults`).
    """
    rank, failed = error.get_first_failure()
    marks: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        marks = Path(exit_file).read_text().split()
    if str(failed.exitcode) not in marks and not Path(faults, f"{failed.pid}.json").is_file():
        yield f"rank {rank} failed first: {_describe(failed)}"
    for other, failure in sorted(error.failures.items()):
        if other != rank and failure.exitcode < 0 and failure.signal_name() != "SIGTERM":
            yield f"rank {other} failed too: {_describe(failure)}"


def _describe(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    name = failure.signal_name()
    return f"{name} ({MEANINGS[name]})" if name in MEANINGS else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
