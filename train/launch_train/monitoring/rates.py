"""Counters that only grow, as so much a second."""

from __future__ import annotations

from collections.abc import Mapping


class Rates:
    """Between two looks; the first one gives none, and neither does a counter that is new or was set back."""

    def __init__(self) -> None:
        self._at = 0.0
        self._last: Mapping[str, float] = {}

    def of(self, counters: Mapping[str, float], now: float) -> dict[str, float]:
        """`now` are seconds of the monotonic clock."""
        seconds, last = now - self._at, self._last
        self._at, self._last = now, counters
        grown = {name: value - last[name] for name, value in counters.items() if name in last}
        return {name: more / seconds for name, more in grown.items() if more >= 0} if seconds > 0 else {}
