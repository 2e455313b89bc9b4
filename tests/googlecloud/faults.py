"""What can go wrong between a client and the cloud, on order.

    fault = cloud.faults.add(Fault("storage.objects.insert", Status(503), name=r"^runs/", times=2, after=1))
    cloud.faults.down(until=clock() + 180)
    ...
    assert cloud.faults.used[fault] == 2

The first fault that fits a request has its effect on it. Operations have Google's names (storage.objects.insert for
every way to upload, storage.objects.get for metadata and bytes); "" is the name of a request that nobody here answers.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.googlecloud.effects import Effect, Reset, Serve, Slow, Status, Step
from tests.googlecloud.wire import Call

__all__ = ["Effect", "Fault", "Faults", "Outage", "Reset", "Serve", "Slow", "Status", "Step"]


@dataclass(frozen=True)
class Fault:
    """`effect` on the requests of `operation` (a glob: storage.*) whose resource's name `name` (a regex) is found in.

    `after` such requests pass first; then `times` of them (None: all) have the effect. For lists the name is the
    prefix asked for, for storage.buckets.get the bucket.
    """

    operation: str
    effect: Effect
    name: str = ""
    step: Step | None = None
    times: int | None = 1
    after: int = 0

    def fits(self, call: Call) -> bool:
        """Whether a request is of the kind meant."""
        steps = {self.step, self.effect.step} - {None}
        named = re.search(self.name, call.target.name) is not None
        return named and fnmatchcase(call.operation, self.operation) and steps <= {call.target.step}


@dataclass(frozen=True)
class Outage:
    """`effect` on every request until a time of the cloud's clock."""

    until: float
    effect: Effect


class Faults:
    """The plan. `used` counts how often each fault and outage had its effect."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.used: Counter[Fault | Outage] = Counter()
        self._plan: list[_Planned] = []
        self._outages: list[Outage] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> Fault:
        """Plan a fault, behind those already planned. Answers it, as the key in `used`."""
        with self._lock:
            self._plan.append(_Planned(fault))
        return fault

    def down(self, until: float, effect: Effect | None = None) -> Outage:
        """Refuse everything before `until`: by a reset connection, or by `effect`, such as Status(503)."""
        outage = Outage(until, effect or Reset())
        with self._lock:
            self._outages.append(outage)
        return outage

    def clear(self) -> None:
        """Plan nothing more. What was used stays counted."""
        with self._lock:
            self._plan.clear()
            self._outages.clear()

    @property
    def planned(self) -> bool:
        """Whether a request could meet a fault at all."""
        return bool(self._plan or self._outages)

    def meet(self, call: Call) -> Effect | None:
        """The effect on this request, which is counted; None: it passes."""
        with self._lock:
            found = next((outage for outage in self._outages if self.clock() < outage.until), None)
            fault = found or next((entry.fault for entry in self._plan if entry.takes(call)), None)
            if fault is None:
                return None
            self.used[fault] += 1
            return fault.effect


@dataclass
class _Planned:
    """A fault and the number of requests that fitted it."""

    fault: Fault
    met: int = 0

    def takes(self, call: Call) -> bool:
        """Whether this request has the effect. Must be asked once for each request."""
        fault = self.fault
        if not fault.fits(call) or (fault.times is not None and self.met >= fault.after + fault.times):
            return False
        self.met += 1
        return self.met > fault.after
