"""torchrun, but for its last words: a failed worker is one line, not forty lines of torchrun's own traceback.

A user's error stands in the workers' output; what torchrun adds to it must not push it off the screen. Run as a script,
so that neither our package nor the user's folder is on its path.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

EXIT_FILE: Final = "LAUNCH_EXIT_FILE"
"""launch_train.common.contract.EXIT_FILE, which can't be imported here: where a worker that ended on purpose has
written its code."""
FAULTS: Final = "LAUNCH_FAULTS"
"""launch_train.common.contract.FAULTS: where a worker has recorded the exception that it failed with, which the node
reports."""

SHUTDOWN: Final = "--shutdown-timeout"

QUIET: Final = {
    "torch.distributed.elastic.multiprocessing.api": logging.CRITICAL,  # each failure, and what it does to the others
    "torch.distributed.elastic.agent.server.api": logging.ERROR,  # a signal that the node has sent
}
"""Loggers of torchrun's, and from which level on they speak: what they say below it, in up to 180 columns, is told by
`main` or by the node."""

MEANINGS: Final = {
    "SIGKILL": "out of memory?",
    "SIGSEGV": "crash in native code",
    "SIGABRT": "native code gave up",
    "SIGBUS": "is /dev/shm full?",
    "SIGILL": "code for other CPUs",
    "SIGFPE": "bad arithmetic",
}


def main(argv: Sequence[str]) -> int:
    """Run torchrun; 0, the exit code of the first worker that failed (128 + a signal's number), or 128 + the signal
    that ended torchrun itself."""
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    try:
        torchrun(_understood(argv, get_args_parser()))
    except ChildFailedError as error:
        for line in lines(error, os.environ.get(EXIT_FILE, ""), os.environ.get(FAULTS, "")):
            print(f"launch: {line}", file=sys.stderr, flush=True)
        _, failed = error.get_first_failure()
        return failed.exitcode if failed.exitcode > 0 else 128 - failed.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _understood(argv: Sequence[str], parser: ArgumentParser) -> list[str]:
    """torch 2.11 has no --shutdown-timeout, but the default of a method: the seconds until workers are killed."""
    if SHUTDOWN in parser._option_string_actions:
        return list(argv)
    for word in argv:
        if word.startswith(f"{SHUTDOWN}="):
            PContext.close.__defaults__ = (None, int(word.partition("=")[2]))
    return [word for word in argv if not word.startswith(f"{SHUTDOWN}=")]


def lines(error: ChildFailedError, exit_file: str, faults: str = "") -> Iterator[str]:
    """What the output doesn't say by itself: which rank was the first to fail, and what killed it. Nothing of ranks
    that torchrun ended for that, and nothing at all where a worker has said why it ends (its code is in `exit_file`, or
    its exception in the folder `faults`).
    """
    rank, failed = error.get_first_failure()
    if str(failed.exitcode) not in _marks(exit_file) and not Path(faults, f"{failed.pid}.json").is_file():
        yield f"rank {rank} failed first: {_how(failed)}"
    for other, failure in sorted(error.failures.items()):
        if other != rank and failure.exitcode < 0 and failure.signal_name() != "SIGTERM":
            yield f"rank {other} failed too: {_how(failure)}"


def _how(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    name = failure.signal_name()
    return f"{name} ({MEANINGS[name]})" if name in MEANINGS else name


def _marks(exit_file: str) -> list[str]:
    try:
        return Path(exit_file).read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
