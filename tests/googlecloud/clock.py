"""A clock that moves only when a test says so."""

from __future__ import annotations


class FakeClock:
    """Called, it answers Unix seconds."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`."""
        self.now += seconds
