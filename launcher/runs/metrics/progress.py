"""How far a run is, from the metrics in its folder: the parts that are new, and a few of the newest at first."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any, Final, NamedTuple

from msgspec import Struct

from launch_train.common import contract
from launch_train.common.storage import Storage
from launcher.backend.request import is_vm, read
from launcher.clock import REAL, Clock
from launcher.gcp.storage import read_errors
from launcher.jobs.job import Job
from launcher.plan.container import expand
from launcher.runs.metrics.results import PART, Record, figure, records

ROWS: Final = 50
"""The last rows, from which speed and time left are taken."""
PARTS: Final = 20
"""Parts that are read at most in one look: a long run has tens of thousands."""
ANSWER_SECONDS: Final = 20.0
"""For one question to the bucket: the next look asks again."""
LIST_EVERY: Final = 60.0
"""Seconds between two lists of all parts while nothing new comes: processes that were started again write under other
names. The next part of those that run is asked for by its name."""
UNITS: Final = ("tokens", "images")
"""What the built-in trainer counts in a second; a script of its own may do likewise."""


class Progress(Struct, frozen=True, kw_only=True):
    """How far a run is, as far as its metrics say it. None is unknown."""

    step: int
    """The newest step, from 1; 0: it has begun."""
    steps: int | None = None
    loss: float | None = None
    rate: float | None = None
    """`unit` a second, over the last steps."""
    unit: str = "steps"
    """tokens, images or steps."""
    eta_seconds: float | None = None
    time: float | None = None
    """When the newest step ended, in Unix seconds by the node's clock."""


class Place(NamedTuple):
    """One part: attempt (from 1), generation, node and part (from 0)."""

    attempt: int
    generation: int
    node: int
    part: int


class ProgressReader:
    """The metrics of one attempt, read as they come."""

    def __init__(self, folder: Storage, job: Job | None = None, *, attempt: int = 1, clock: Clock = REAL) -> None:
        """The job's request may say how many steps there will be. What attempts before this one wrote is history."""
        self._folder = folder.within(ANSWER_SECONDS)
        self._attempt = attempt
        self._steps = steps_asked(job.request if job else {})
        self._clock = clock
        self._newest: Place | None = None
        self._listed = float("-inf")
        self._rows: deque[Record] = deque(maxlen=ROWS)
        self._from: int | None = None
        """The step that this start goes on from, if it said so and has made none."""

    def new(self) -> Progress | None:
        """How far it is; None: nothing new. Raises LaunchError: the run folder can't be read (now)."""
        with read_errors():
            found = self._next() or self._listed_anew()
        if not found or not (self._rows or self._from is not None):
            return None
        return summary(tuple(self._rows), self._steps, self._from)

    def _next(self) -> bool:
        """Read the parts after the newest one. Whether there were any."""
        before = self._newest
        for _ in range(PARTS):
            if self._newest is None or not self._read(self._newest._replace(part=self._newest.part + 1)):
                break
        return self._newest != before

    def _listed_anew(self) -> bool:
        """Read the newest parts of all, if a newer start has written some. Whether there were any."""
        if self._clock.now() - self._listed < LIST_EVERY and self._newest is not None:
            return False
        names = self._folder.list(f"{contract.METRICS}/")
        self._listed = self._clock.now()
        places = sorted(place for name in names if (place := place_of(name)) and place.attempt >= self._attempt)
        if not places or (self._newest is not None and places[-1] <= self._newest):
            return False
        same = [place for place in places if place[:2] == places[-1][:2]]
        for place in [same[0], *same[max(1, len(same) - PARTS) :]]:  # the first one says how it began
            self._read(place)
        return True

    def _read(self, place: Place) -> bool:
        """Take in one part. Whether it is there."""
        try:
            text = self._folder.read(contract.metrics_part(*place))
        except FileNotFoundError:
            return False
        if self._newest is None or place[:2] != self._newest[:2]:  # another start: what came before is history
            self._rows.clear()
            self._from = None
        self._newest = place
        for record in records(text):
            self._take(record)
        return True

    def _take(self, record: Record) -> None:
        if "event" not in record:
            if whole(record.get("step")) is not None:
                self._rows.append(record)
        elif record["event"] == "start":
            self._steps = steps_said(record) or self._steps
            self._from = 0 if self._from is None else self._from
        elif record["event"] == "resumed":
            self._from = whole(record.get("step"))


def place_of(name: str) -> Place | None:
    """Which part a name means; None: none that is read here. A variant (its name had been taken) is left to reports."""
    found = PART.match(name)
    return Place(*map(int, found.groups()[:4])) if found and found[5] is None else None


def summary(rows: tuple[Record, ...], steps: int | None, begun: int | None) -> Progress:
    """What the last rows of one start come to; without any, only where it began."""
    if not rows:
        return Progress(step=begun or 0, steps=steps)
    last = rows[-1]
    step, each = int(last["step"]), seconds_a_step(rows)
    unit = next((unit for unit in UNITS if number(last.get(f"{unit}_per_s"))), "steps")
    speeds = [speed for row in rows if (speed := number(row.get(f"{unit}_per_s")))]
    return Progress(
        step=step,
        steps=steps,
        loss=figure(last, "loss") if last.get("loss") is None else number(last["loss"]),
        rate=median_low(speeds) if speeds else 1 / each if each else None,
        unit=unit,
        eta_seconds=max(0, steps - step) * each if steps is not None and each else None,
        time=number(last.get("time")),
    )


def seconds_a_step(rows: tuple[Record, ...]) -> float | None:
    """From the times of the rows, so that what lies between two steps (a checkpoint, an evaluation) counts too; else
    from what a row says of its step. None where nothing can be made of them."""
    timed = [(int(row["step"]), time) for row in rows if (time := number(row.get("time"))) is not None]
    if len(timed) > 1:
        (first, began), (last, ended) = timed[0], timed[-1]
        if last > first and ended > began:
            return (ended - began) / (last - first)
    said = [seconds for row in rows if (seconds := number(row.get("step_s"))) and seconds > 0]
    return median_low(said) if said else None


def steps_asked(request: Mapping[str, Any]) -> int | None:
    """The steps that the request's config names."""
    try:
        text = read(request).env.get(contract.CONFIG, "")
        config = json.loads(text if is_vm(request) else expand(text, {}))
        return positive(config.get("steps"))
    except (LookupError, TypeError, AttributeError, ValueError):
        return None  # a request that somebody else wrote


def steps_said(event: Record) -> int | None:
    """The steps that a `start` event names: the built-in trainer's in its config."""
    config = event.get("config")
    return positive(event.get("steps")) or positive(config.get("steps") if isinstance(config, Mapping) else None)


def positive(value: Any) -> int | None:
    """A whole number above 0, or None."""
    found = whole(value)
    return found if found and found > 0 else None


def whole(value: Any) -> int | None:
    """A whole number, or None. True is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
