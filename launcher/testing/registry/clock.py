"""Time that passes only when somebody waits, or a test says so."""

from __future__ import annotations


class FakeTime:
    """`now` and `sleep` in seconds; `waited` are the waits, in their order."""

    def __init__(self, now: float = 1000.0) -> None:
        self.waited: list[float] = []
        self._now = now

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        self._now += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass without a wait."""
        self._now += seconds
