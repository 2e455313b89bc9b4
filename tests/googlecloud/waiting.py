"""Wait for the loopback cloud."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition is true; fail the test after `seconds`."""
    over = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < over, "it never came"
        time.sleep(0.01)
