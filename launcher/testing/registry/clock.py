"""A fake clock that advances when code sleeps, or when a test advances it."""

from __future__ import annotations


class FakeTime:
    """A clock in seconds. `waited` has the durations of all sleeps, in order."""

    def __init__(self, now: float = 1000.0) -> None:
        self.waited: list[float] = []
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Advance the clock without recording a sleep."""
        self._now += seconds
