"""Convert growing counters into rates per second."""

from __future__ import annotations

from collections.abc import Mapping


class Rates:
    """Rates between two samples. The first sample has none, nor has a counter that is new or was reset."""

    def __init__(self) -> None:
        self._at = 0.0
        self._last: Mapping[str, float] = {}

    def of(self, counters: Mapping[str, float], now: float) -> dict[str, float]:
        """Return the rates since the last call; `now` is in seconds of the monotonic clock."""
        seconds, last = now - self._at, self._last
        self._at, self._last = now, counters
        grown = {name: value - last[name] for name, value in counters.items() if name in last}
        return {name: more / seconds for name, more in grown.items() if more >= 0} if seconds > 0 else {}
