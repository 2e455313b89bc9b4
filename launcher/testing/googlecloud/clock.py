"""A clock that only tests move."""

from __future__ import annotations


class FakeClock:
    """Returns Unix seconds when called."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self.now += seconds
