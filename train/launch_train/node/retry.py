"""A run folder that can't be used for a moment is tried again: a paid run doesn't end because of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from launch_train.node.control_store import Timing

T = TypeVar("T")


def patiently(
    ask: Callable[[], T],
    errors: tuple[type[Exception], ...],
    timing: Timing,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> T:
    """What `ask` reads or writes in the run folder, tried until it can. `pause` waits so many seconds, or raises.

    Raises the last of `errors` after `timing.patience` seconds.
    """
    start, said = time.monotonic(), float("-inf")
    while True:
        try:
            return ask()
        except errors as error:
            now = time.monotonic()
            if now - start >= timing.patience:
                raise
            if now - said >= timing.line:
                said = now
                say(f"{error}; trying again for {timing.patience - (now - start):.0f} s")
        pause(timing.again)
