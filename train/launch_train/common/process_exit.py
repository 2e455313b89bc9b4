"""Exit of a training process: exit codes, and the exit itself."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from launch_train.common import contract, faults
from launch_train.common.contract import Exit
from launch_train.common.errors import TrainError

_DELIBERATE = frozenset(Exit) - {Exit.FAILED}


def run_program(name: str, work: Callable[[], object], should_report: Callable[[BaseException], bool]) -> int:
    """Run a program's `work` and return the exit code for `exit_process`, whatever happens.

    Where `should_report` returns true, a TrainError is printed as one line, any other with a traceback.
    """
    try:
        work()
    except TrainError as error:
        if should_report(error):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        return int(error.exit)
    except SystemExit as stopped:
        return _exit_code(stopped)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - the process ends here, by os._exit
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            return 128 + signal.SIGPIPE
        faults.report(error, visible=should_report(error))
        return int(Exit.FAILED)
    return int(Exit.OK)


def _exit_code(stopped: SystemExit) -> int:
    """Return the exit code of a SystemExit; if it has a text, print it."""
    if stopped.code is None or isinstance(stopped.code, int):
        return stopped.code or 0
    print(stopped.code, file=sys.stderr, flush=True)
    return int(Exit.FAILED)


def is_stdout_closed() -> bool:
    """Return whether the reader of stdout has exited (`… | head`), which is no error."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def exit_process(code: int, *, rank: int = 0) -> NoReturn:
    """Exit with `code`, without the interpreter's own exit, in which gloo may abort or hang.

    torchrun turns every failure into 1, so a deliberate exit code is also written to the node's exit file. torchrun
    ends all ranks as soon as one exits, so rank 0, which prints errors, gets a moment, and so do the ranks that wait
    for it.
    """
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the end of a DataLoader worker is no error any more
    if code and "RANK" in os.environ:
        time.sleep(1.0 if rank else 0.2)
    try:
        if code in _DELIBERATE and (path := os.environ.get(contract.EXIT_FILE)):
            with Path(path).open("a") as file:
                file.write(f"{int(code)}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:  # a full disk, a closed pipe: the process must exit anyway
        with suppress(OSError, ValueError):
            if not isinstance(error, BrokenPipeError):
                print(f"train: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))
