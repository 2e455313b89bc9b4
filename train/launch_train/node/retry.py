"""Retry while the run folder is unreachable: an outage must not end a paid run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from launch_train.node.control_store import Timing

T = TypeVar("T")


def retry_until(
    ask: Callable[[], T],
    errors: tuple[type[Exception], ...],
    timing: Timing,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> T:
    """Return the result of `ask`, retried while it raises one of `errors`. `pause` waits so many seconds, or raises.

    Raises the last error after `timing.retry` seconds.
    """
    start, reported = time.monotonic(), float("-inf")
    while True:
        try:
            return ask()
        except errors as error:
            now = time.monotonic()
            if now - start >= timing.retry:
                raise
            if now - reported >= timing.line:
                reported = now
                say(f"{error}; retrying for {timing.retry - (now - start):.0f} s")
        pause(timing.retry_every)
