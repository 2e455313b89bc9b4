"""A clock that only tests move."""

from __future__ import annotations


class FakeClock:
    """Returns Unix seconds when called. `waited` has the durations of all sleeps, in order."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now
        self.waited: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move forward by `seconds`, and record it."""
        self.waited.append(seconds)
        self.now += seconds

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self.now += seconds
