"""How a training process ends: at once, and with a word to the node about why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from train import contract
from train.contract import Exit

_DELIBERATE = frozenset(Exit) - {Exit.FAILED}


class Told:
    """Whether this process was told to stop."""

    signum = 0

    def obey(self) -> None:
        """Raise SystemExit if it was: the end of a step is a good place to stop."""
        if self.signum:
            raise SystemExit(128 + self.signum)


@contextmanager
def heeding_sigterm() -> Iterator[Told]:
    """Inside, SIGTERM is only noted. Only the main thread can have it so; elsewhere nothing is changed."""
    told = Told()

    def note(signum: int, _frame: FrameType | None) -> None:
        told.signum = signum

    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def leave(code: int, *, rank: int = 0) -> NoReturn:
    """End this process with `code`, without the interpreter's own exit, in which gloo may abort or hang.

    torchrun turns every failure into 1, so a deliberate end is also noted in the file that the node named. It ends all
    ranks as soon as one has gone: rank 0, which speaks for all, gets a moment, and so do those who listen to it.
    """
    if code and "RANK" in os.environ:
        time.sleep(1.0 if rank else 0.2)
    try:
        _note(code)
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:  # a full disk, a closed pipe: nothing may keep this process here
        with suppress(OSError, ValueError):
            print(f"train: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))


def _note(code: int) -> None:
    if code in _DELIBERATE and (path := os.environ.get(contract.EXIT_FILE)):
        with Path(path).open("a") as file:
            file.write(f"{int(code)}\n")
