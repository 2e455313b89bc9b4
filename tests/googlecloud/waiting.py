"""How long these tests wait for the loopback cloud."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.testing.googlecloud import Slow, Stalled
from launcher.testing.googlecloud.faults import Effect


def patience(effect: Effect) -> float:
    """Return the client's timeout in seconds: short only if nothing else ends its wait."""
    return 0.3 if isinstance(effect, Slow | Stalled) else 60.0


def until(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition is true; fail the test after `seconds`."""
    over = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < over, "it never came"
        time.sleep(0.01)
