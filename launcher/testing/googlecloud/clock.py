"""Times in UTC, and actions that are due by the cloud's clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count


def utc(seconds: float) -> datetime:
    """Return Unix seconds as a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


class Timeline:
    """Actions that are due at a time. Nothing runs by itself: `settle` performs the due actions in order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._at: float | None = None

    def now(self) -> float:
        """Return Unix seconds: the time of the current action, else of the clock."""
        return self._clock() if self._at is None else self._at

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule an action `seconds` from now."""
        heapq.heappush(self._due, (self.now() + seconds, next(self._order), action))

    def settle(self) -> None:
        """Perform all due actions, and those that become due by them."""
        while self._due and self._due[0][0] <= self._clock():
            self._at, _, action = heapq.heappop(self._due)
            try:
                action()
            finally:
                self._at = None
