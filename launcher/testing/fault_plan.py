"""A list of planned faults, which a loopback server asks about each request."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """A fault: the first `after` matching requests pass; the next `times` of them (None: all) are affected."""

    times: int | None = 1
    after: int = 0


FaultType = TypeVar("FaultType", bound=PlannedFault)


class FaultPlan(Generic[FaultType]):
    """The planned faults, in order. `used` counts how often each had an effect."""

    def __init__(self) -> None:
        self.used: Counter[object] = Counter()
        self._faults: list[FaultType] = []
        self._matched: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add(self, fault: FaultType) -> FaultType:
        """Add a fault after those already planned. Returns it as the key in `used`."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Remove all planned faults. `used` is kept."""
        with self._lock:
            self._faults.clear()
            self._matched.clear()

    def take(self, matches: Callable[[FaultType], bool]) -> FaultType | None:
        """Return the first fault that affects a request, and count it. Must be called once per request."""
        with self._lock:
            for index, fault in enumerate(self._faults):
                if not matches(fault) or (
                    fault.times is not None and self._matched[index] >= fault.after + fault.times
                ):
                    continue
                self._matched[index] += 1
                if self._matched[index] > fault.after:
                    self.used[fault] += 1
                    return fault
        return None
