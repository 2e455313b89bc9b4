"""Planned faults between a client and the cloud.

    fault = cloud.faults.add(Fault("storage.objects.insert", Status(503), name=r"^runs/", times=2, after=1))
    cloud.faults.down(until=clock() + 180)
    ...
    assert cloud.faults.used[fault] == 2

The first fault that matches a request affects it. Operations have Google's names (storage.objects.insert for all kinds
of upload, storage.objects.get for metadata and bytes). "" matches requests without a route.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from launcher.testing.googlecloud.effects import Effect, Reset, Serve, Slow, Status, Step
from launcher.testing.googlecloud.wire import Call

__all__ = ["Effect", "Fault", "Faults", "Outage", "Reset", "Serve", "Slow", "Status", "Step"]


@dataclass(frozen=True)
class Fault:
    """`effect` on the requests of `operation` (a glob: storage.*) with a resource name that matches `name` (a regex).

    The first `after` requests pass; the next `times` of them (None: all) are affected. For lists the name is the
    requested prefix, for storage.buckets.get the bucket.
    """

    operation: str
    effect: Effect
    name: str = ""
    step: Step | None = None
    times: int | None = 1
    after: int = 0

    def fits(self, call: Call) -> bool:
        """Return whether a request matches."""
        steps = {self.step, self.effect.step} - {None}
        named = re.search(self.name, call.target.name) is not None
        return named and fnmatchcase(call.operation, self.operation) and steps <= {call.target.step}


@dataclass(frozen=True)
class Outage:
    """`effect` on every request until a time of the cloud's clock."""

    until: float
    effect: Effect


class Faults:
    """The planned faults. `used` counts how often each fault and outage had an effect."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.used: Counter[Fault | Outage] = Counter()
        self._plan: list[_Planned] = []
        self._outages: list[Outage] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Add a fault after those already planned. Returns it as the key in `used`."""
        with self._lock:
            self._plan.append(_Planned(fault))
        return fault

    def down(self, until: float, effect: Effect | None = None) -> Outage:
        """Refuse all requests before `until`, by resetting the connection or with `effect`, such as Status(503)."""
        outage = Outage(until, effect or Reset())
        with self._lock:
            self._outages.append(outage)
        return outage

    def clear(self) -> None:
        """Remove all planned faults. `used` is kept."""
        with self._lock:
            self._plan.clear()
            self._outages.clear()

    @property
    def planned(self) -> bool:
        """Return whether any fault is planned."""
        return bool(self._plan or self._outages)

    def meet(self, call: Call) -> Effect | None:
        """Return the effect on this request and count it. None: it passes."""
        with self._lock:
            found = next((outage for outage in self._outages if self.clock() < outage.until), None)
            fault = found or next((entry.fault for entry in self._plan if entry.takes(call)), None)
            if fault is None:
                return None
            self.used[fault] += 1
            return fault.effect


@dataclass
class _Planned:
    """A fault and the number of requests that matched it."""

    fault: Fault
    met: int = 0

    def takes(self, call: Call) -> bool:
        """Return whether this request is affected. Must be called once per request."""
        fault = self.fault
        if not fault.fits(call) or (fault.times is not None and self.met >= fault.after + fault.times):
            return False
        self.met += 1
        return self.met > fault.after
