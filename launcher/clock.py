"""The clock of all code that waits; tests pass a fake clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple


class Clock(NamedTuple):
    """A monotonic time and a sleep, both in seconds."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL: Final = Clock()


def stopwatch(clock: Clock, wall: Callable[[], float]) -> Callable[[], float]:
    """Return a function that returns the seconds since this call.

    Time in system sleep counts: `wall` advances during it, a monotonic clock does not.
    """
    began, began_wall = clock.now(), wall()
    return lambda: max(clock.now() - began, wall() - began_wall)
