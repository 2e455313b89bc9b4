"""Read a run's progress from the metrics in its folder: a few of the newest parts first, then each new one."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import Any, Final

from msgspec import Struct

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.storage import Storage
from launch_train.runfolder import Part, figure
from launch_train.runfolder.starts import Record
from launcher.clock import REAL, Clock
from launcher.gcp.storage import read_errors
from launcher.jobs.job import Job
from launcher.plan.container import expand
from launcher.services.request import is_vm, read

ROWS: Final = 50
"""Number of newest rows from which speed and remaining time are computed."""
RECENT: Final = 1000
"""Number of newest rows that are kept for curves."""
MAX_PARTS: Final = 20
"""Parts read per call: a long run has tens of thousands."""
ANSWER_SECONDS: Final = 20.0
"""Timeout of one storage call; the next poll tries again."""
LIST_INTERVAL: Final = 60.0
"""Seconds between two listings of all parts. Restarted processes write under other names; otherwise the next part's
name is known and needs no listing."""
UNITS: Final = ("tokens", "images")
"""The rows' `<unit>_per_s`, as the built-in trainer logs them; custom scripts may do the same."""


class Progress(Struct, frozen=True, kw_only=True):
    """A run's progress according to its metrics. None: unknown."""

    step: int
    """The newest step, from 1; 0 before the first step."""
    steps: int | None = None
    loss: float | None = None
    rate: float | None = None
    """In `unit` per second, over the last steps."""
    unit: str = "steps"
    """tokens, images or steps."""
    eta_seconds: float | None = None
    time: float | None = None
    """When the newest step ended, in Unix seconds by the node's clock."""


class ProgressReader:
    """Read the metrics of one attempt as they are written."""

    def __init__(
        self,
        folder: Storage,
        job: Job | None = None,
        *,
        attempt: int = 1,
        clock: Clock = REAL,
        list_interval: float = LIST_INTERVAL,
    ) -> None:
        """The job's request may contain the number of steps. Parts of earlier attempts than `attempt` are ignored."""
        self._folder = folder.within(ANSWER_SECONDS)
        self._attempt = attempt
        self._steps = requested_steps(job.request if job else {})
        self._clock = clock
        self._newest: Part | None = None
        self._listed_at = float("-inf")
        self._list_interval = list_interval
        self._rows: deque[Record] = deque(maxlen=ROWS)
        self._recent: dict[int, Record] = {}
        """By step."""
        self._resumed_from: int | None = None
        """The step that this start resumed from, if it logged one and has no rows yet."""

    def read_new(self) -> Progress | None:
        """Return the progress; None: nothing new since the last call. Raises LaunchError: the run folder can't be
        read."""
        with read_errors():
            has_new = self._read_next_parts() or self._list_and_read()
        if not has_new or not (self._rows or self._resumed_from is not None):
            return None
        return summarize_rows(tuple(self._rows), self._steps, self._resumed_from)

    @property
    def newest_rows(self) -> tuple[Record, ...]:
        """Return the newest rows that were read, of all starts, in order of steps."""
        return tuple(self._recent[step] for step in sorted(self._recent))

    def _read_next_parts(self) -> bool:
        """Read the parts after the newest one; return whether there were any."""
        before = self._newest
        for _ in range(MAX_PARTS):
            if self._newest is None or not self._read(self._newest._replace(part=self._newest.part + 1)):
                break
        return self._newest != before

    def _list_and_read(self) -> bool:
        """List all parts, and read those of a newer start of the processes; return whether there were any."""
        if self._clock.now() - self._listed_at < self._list_interval and self._newest is not None:
            return False
        names = self._folder.list(f"{runfolder.METRICS}/")
        self._listed_at = self._clock.now()
        # Only reports read variants (the name without the number had been taken).
        parts = [
            part for part, _ in runfolder.parts_in_order(names) if not part.variant and part.attempt >= self._attempt
        ]
        if not parts or (self._newest is not None and parts[-1] <= self._newest):
            return False
        same_start = [part for part in parts if part[:2] == parts[-1][:2]]
        # The first part has the start's events.
        for part in [same_start[0], *same_start[max(1, len(same_start) - MAX_PARTS) :]]:
            self._read(part)
        return True

    def _read(self, part: Part) -> bool:
        """Read one part; return whether it exists."""
        try:
            text = self._folder.read(runfolder.metrics_part(*part[:4]))
        except FileNotFoundError:
            return False
        if self._newest is None or part[:2] != self._newest[:2]:  # another start: the earlier rows don't count
            self._rows.clear()
            self._resumed_from = None
        self._newest = part
        for record in runfolder.records(text):
            self._add(record)
        return True

    def _add(self, record: Record) -> None:
        if "event" not in record:
            if (step := as_int(record.get("step"))) is not None:
                if not self._rows:  # the first row of a start, which repeats the steps from here
                    self._recent = {before: row for before, row in self._recent.items() if before < step}
                self._rows.append(record)
                self._recent[step] = record
                if len(self._recent) > RECENT:
                    del self._recent[min(self._recent)]
        elif record["event"] == "start":
            self._steps = logged_steps(record) or self._steps
            self._resumed_from = 0 if self._resumed_from is None else self._resumed_from
        elif record["event"] == "resumed":
            self._resumed_from = as_int(record.get("step"))


def summarize_rows(rows: tuple[Record, ...], steps: int | None, resumed_from: int | None) -> Progress:
    """Return the progress that the last rows of one start show; without rows, the step it resumed from."""
    if not rows:
        return Progress(step=resumed_from or 0, steps=steps)
    last = rows[-1]
    step, step_seconds = int(last["step"]), seconds_per_step(rows)
    unit = next((unit for unit in UNITS if as_float(last.get(f"{unit}_per_s"))), "steps")
    speeds = [speed for row in rows if (speed := as_float(row.get(f"{unit}_per_s")))]
    return Progress(
        step=step,
        steps=steps,
        loss=figure(last, "loss") if last.get("loss") is None else as_float(last["loss"]),
        rate=median_low(speeds) if speeds else as_float(1 / step_seconds) if step_seconds else None,
        unit=unit,
        eta_seconds=as_float(max(0, steps - step) * step_seconds) if steps is not None and step_seconds else None,
        time=as_float(last.get("time")),
    )


def parse_record(text: bytes) -> Progress | None:
    """Return the progress in a run's `progress.json`; None: it is malformed."""
    record = next(iter(runfolder.records(text)), {})
    row, steps = record.get("row"), as_positive_int(record.get("steps"))
    if not isinstance(row, Mapping) or as_int(row.get("step")) is None:
        return None
    return summarize_rows((row,), steps, None)


def seconds_per_step(rows: tuple[Record, ...]) -> float | None:
    """Return the seconds per step; None: unknown.

    The rows' timestamps include the time between steps (checkpoints, evaluation). Without them, the rows' `step_s`
    count.
    """
    timed = [(int(row["step"]), time) for row in rows if (time := as_float(row.get("time"))) is not None]
    if len(timed) > 1:
        (first, began), (last, ended) = timed[0], timed[-1]
        if last > first and ended > began:
            return (ended - began) / (last - first)
    logged = [seconds for row in rows if (seconds := as_float(row.get("step_s"))) and seconds > 0]
    return median_low(logged) if logged else None


def requested_steps(request: Mapping[str, Any]) -> int | None:
    """Return the number of steps in the config of a job's request, or None."""
    try:
        text = read(request).env.get(contract.CONFIG, "")
        config = json.loads(text if is_vm(request) else expand(text, {}))
        return as_positive_int(config.get("steps"))
    except (LookupError, TypeError, AttributeError, ValueError):
        return None  # not launch's own request


def logged_steps(event: Record) -> int | None:
    """Return the number of steps in a `start` event or, as the built-in trainer logs it, in the event's config."""
    config = event.get("config")
    steps = as_positive_int(event.get("steps"))
    return steps or as_positive_int(config.get("steps") if isinstance(config, Mapping) else None)


def as_positive_int(value: Any) -> int | None:
    """Return `value` if it is an int above 0, else None."""
    number = as_int(value)
    return number if number and number > 0 else None


def as_int(value: Any) -> int | None:
    """Return `value` if it is an int and no bool, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_float(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number, else None."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
