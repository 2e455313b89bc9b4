"""The starts of a run's processes: the rows and events that each wrote, and which of its steps are valid.

The run's state is that of its newest start, so whatever an older one recorded for later steps doesn't count. Rows are
columns of numbers, of which a million with ten values take 80 MB, or the records as they were written.
"""

from __future__ import annotations

import bisect
import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from operator import itemgetter, lt
from typing import Any, Final

from launch_train import runfolder
from launch_train.common.storage import Storage

Record = Mapping[str, Any]

READERS: Final = 8
"""Files read in parallel."""

LARGEST_STEP: Final = 1 << 62
"""A script may log any number; this is what a column of steps holds."""

NOT_VALUES: Final = frozenset({"step", "time", "nonfinite"})


class Columns:
    """The rows of one start of the processes, by step: `steps`, and a value for each step in each column.

    `nan` is a value that was not a number, or that the row doesn't have.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        """Unix seconds at the end of each step."""
        self.values: dict[str, array[float]] = {}

    def add(self, row: Record) -> None:
        self.steps.append(row["step"])
        time: Any = row.get("time")
        self.times.append(float(time) if is_number(time) else math.nan)
        for name, value in row.items():
            if name not in NOT_VALUES and type(value) in (int, float) and abs(value) <= sys.float_info.max:
                column = self.values.get(name)
                if column is None:
                    column = self.values[name] = array("d")
                column.extend([math.nan] * (len(self.steps) - 1 - len(column)))
                column.append(value)

    def extend(self, more: Columns) -> None:
        """Append rows that all have the same columns."""
        for name, values in more.values.items():
            column = self.values.setdefault(name, array("d"))
            column.extend([math.nan] * (len(self.steps) - len(column)))
            column.extend(values)
        self.steps.extend(more.steps)
        self.times.extend(more.times)

    def close(self) -> None:
        """Fill the columns up, and sort the rows by step; of several with the same step the last one stays."""
        for column in self.values.values():
            column.extend([math.nan] * (len(self.steps) - len(column)))
        if all(map(lt, self.steps, islice(self.steps, 1, None))):
            return
        newest = {step: place for place, step in enumerate(self.steps)}
        places = [newest[step] for step in sorted(newest)]
        self.steps = array("q", (self.steps[place] for place in places))
        self.times = array("d", (self.times[place] for place in places))
        self.values = {name: array("d", (column[at] for at in places)) for name, column in self.values.items()}


@dataclass
class Start:
    """One start of the processes: its number (attempt from 1, generation from 0), rows and events."""

    key: tuple[int, int]
    rows: Columns = field(default_factory=Columns)
    events: list[Record] = field(default_factory=list)
    records: dict[int, Record] = field(default_factory=dict)
    """The rows by step as they were written, where `add` kept them; `rows` has their steps alone then."""

    @property
    def begins_after(self) -> int | None:
        """Return the step that it resumed from; 0: from scratch; None: it has no rows and names none."""
        for event in self.events:
            if event["event"] == "resumed" and isinstance(event.get("step"), int):
                return int(event["step"])
        return self.rows.steps[0] - 1 if self.rows.steps else None

    @property
    def preempted_at(self) -> int | None:
        """Return the step at which it was preempted, if it was and logged that."""
        steps = (event.get("step") for event in self.events if event["event"] == "preempted")
        return next((step for step in steps if isinstance(step, int)), None)

    def event(self, kind: str) -> Record | None:
        """Return the first event of a kind, or None."""
        return next((event for event in self.events if event["event"] == kind), None)

    def add(self, text: bytes, *, as_records: bool = False) -> None:
        """Add the rows and events of a part."""
        if not as_records and (alike := _alike(text)):
            self.rows.extend(alike)
            return
        records = runfolder.records(text)
        self.events += [record for record in records if isinstance(record.get("event"), str)]
        rows = [record for record in records if "event" not in record]
        if not as_records:
            try:
                self.rows.extend(_uniform_columns(rows))
                return
            except (IndexError, KeyError, TypeError, ValueError, OverflowError):
                pass
        for row in rows:
            if type(row.get("step")) is int and abs(row["step"]) < LARGEST_STEP:
                if as_records:
                    self.records[row["step"]] = row
                else:
                    self.rows.add(row)

    def close(self) -> None:
        """Sort the rows, of which all are added."""
        if self.records:
            self.rows.steps = array("q", sorted(self.records))
        else:
            self.rows.close()


def last_valid_steps(begins: Sequence[int | None]) -> list[float]:
    """Return for each start of a run the last step that no later one has repeated, or infinity. `begins` has the step
    that each began after, the oldest start first."""
    limits, limit = [], math.inf
    for after in reversed(begins):
        limits.append(limit)
        limit = limit if after is None else min(limit, after)
    return limits[::-1]


@dataclass(frozen=True)
class Resumption:
    """How a run resumed after it was stopped. None: unknown."""

    stopped_at: int | None
    """The last step before the stop."""
    resumed_from: int | None
    """The step of the checkpoint it resumed from; 0: from scratch."""

    @property
    def lost(self) -> int | None:
        """Return the number of steps that had to be repeated."""
        if self.stopped_at is None or self.resumed_from is None:
            return None
        return self.stopped_at - self.resumed_from


@dataclass(frozen=True)
class RunMetrics:
    """All starts of a run, the oldest first."""

    starts: tuple[Start, ...] = ()

    @property
    def events(self) -> tuple[Record, ...]:
        """Return the events of all starts, the oldest first."""
        return tuple(event for start in self.starts for event in start.events)

    def event(self, kind: str) -> Record | None:
        """Return the last event of a kind since the newest `start` event, or None."""
        for event in reversed(self.events):
            if event["event"] in (kind, "start"):
                return event if event["event"] == kind else None
        return None

    def evaluations(self) -> dict[int, Record]:
        """Return the newest evaluation of each step that the run went through, in order of steps."""
        newest: dict[int, Record] = {}
        for start, last in self.starts_until():
            for event in start.events:
                if event["event"] == "eval" and type(event.get("step")) is int and is_number(event.get("loss")):
                    newest |= {event["step"]: event} if event["step"] <= last else {}
        return dict(sorted(newest.items()))

    def starts_until(self) -> Iterator[tuple[Start, float]]:
        """Yield each start, the oldest first, with the last step that no later one has repeated."""
        yield from zip(self.starts, last_valid_steps([start.begins_after for start in self.starts]), strict=True)

    def kept(self) -> Iterator[tuple[Start, int]]:
        """Yield each start, the oldest first, with the number of its rows that no later start has repeated."""
        for start, last in self.starts_until():
            yield start, bisect.bisect_right(start.rows.steps, last)

    def series(self) -> Columns:
        """Return the valid rows of the run: each step as the newest start that ran it has it."""
        starts = [*self.kept()]
        if len(starts) == 1:
            return starts[0][0].rows
        series = Columns()
        for start, count in starts:
            rows = start.rows
            for name in rows.values.keys() - series.values.keys():
                series.values[name] = array("d", [math.nan]) * len(series.steps)
            for name, column in series.values.items():
                more = rows.values.get(name)
                column.extend(more[:count] if more else array("d", [math.nan]) * count)
            series.steps.extend(rows.steps[:count])
            series.times.extend(rows.times[:count])
        return series

    @property
    def rows(self) -> tuple[Record, ...]:
        """Return the valid rows as they were written, in order of steps; none if the run was not read so."""
        rows = {step: start.records[step] for start, count in self.kept() for step in start.rows.steps[:count]}
        return tuple(rows[step] for step in sorted(rows))

    @property
    def nonfinite(self) -> dict[str, dict[str, int]]:
        """Return, for each value that was ever nan or infinite in `rows`, its first such step and the number of such
        steps. Steps that the trainer skipped don't count: events report them."""
        counts: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for name in () if "skipped" in row else runfolder.nonfinite(row):
                counts.setdefault(name, {"first_step": row["step"], "steps": 0})["steps"] += 1
        return counts

    def resumption(self, attempt: int) -> Resumption:
        """Return how an attempt resumed after its last stop, according to its events and rows.

        Killed processes log no event; then the newest start that has begun is compared with all earlier ones.
        """
        starts = [start for start in self.starts if start.key[0] == attempt]
        stops = [number for number, start in enumerate(starts, start=1) if start.preempted_at is not None]
        begun = [number for number, start in enumerate(starts) if number and start.begins_after is not None]
        cut = max(stops) if stops else max(begun, default=len(starts))
        resumed_from = next((start.begins_after for start in starts[cut:] if start.begins_after is not None), None)
        if stops:
            return Resumption(stopped_at=starts[cut - 1].preempted_at, resumed_from=resumed_from)
        reached = max((start.rows.steps[-1] for start in starts[:cut] if start.rows.steps), default=None)
        return Resumption(stopped_at=reached if begun else None, resumed_from=resumed_from)


def read_metrics(storage: Storage) -> RunMetrics | None:
    """Return a run's metrics with the rows as they were written; None: it has written none. Raises TrainError."""
    names = storage.list(f"{runfolder.METRICS}/")
    with ThreadPoolExecutor(READERS) as threads:
        return parse_metrics(dict(zip(names, threads.map(storage.read, names), strict=True))) if names else None


def parse_metrics(parts: Mapping[str, bytes]) -> RunMetrics:
    """Return the metrics in parts by name, with the rows as they were written; other names are skipped."""
    starts: dict[tuple[int, int], Start] = {}
    for part, name in runfolder.parts_in_order(parts):
        starts.setdefault(part[:2], Start(part[:2])).add(parts[name], as_records=True)
    for start in starts.values():
        start.close()
    return RunMetrics(tuple(starts.values()))


def _alike(text: bytes) -> Columns | None:
    """Return the rows of a part if they have the same values, all of them numbers, and msgspec is there: `launch` has
    it, a training image may not. This is nearly twice as fast as `_uniform_columns`."""
    found = Columns()
    try:
        from msgspec.structs import astuple

        names = tuple(json.loads(text.partition(b"\n")[0]))
        if {"event", "nonfinite"} & {*names}:
            return None
        rows = map(astuple, _row_decoder(names).decode_lines(text))
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        found.steps, found.times = array("q", columns.pop("step")), array("d", columns.pop("time"))
        found.values = {name: array("d", column) for name, column in columns.items()}
    except (ImportError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    return found


@lru_cache(maxsize=100)
def _row_decoder(names: tuple[str, ...]) -> Any:
    """Return msgspec's decoder of rows with just these values. Raises ImportError; TypeError: they are no names."""
    from msgspec import defstruct
    from msgspec.json import Decoder

    rename = {f"value_{place}": name for place, name in enumerate(names)}  # a metric's name may be no identifier
    types = [(field, int if name == "step" else float) for field, name in rename.items()]
    return Decoder(defstruct("Row", types, rename=rename, forbid_unknown_fields=True, gc=False))


def _uniform_columns(rows: Sequence[Record]) -> Columns:
    """Return rows that have the same keys as columns, which is faster than adding each row.

    Raises IndexError, KeyError, TypeError, ValueError and OverflowError if they are not alike, or no numbers.
    """
    names = rows[0].keys() - NOT_VALUES
    if {*map(len, rows)} != {len(names) + 2}:
        raise ValueError("rows with different columns")
    steps, times, *others = zip(*map(itemgetter("step", "time", *names), rows), strict=True)
    if {*map(type, steps)} != {int} or any(not {*map(type, column)} <= {int, float} for column in others):
        raise TypeError("a value that is no number")
    columns = Columns()
    columns.steps, columns.times = array("q", steps), array("d", times)
    if not all(math.isfinite(sum(column)) for column in (times, *others)):
        raise ValueError("a value that is infinite or no number")
    columns.values = {name: array("d", column) for name, column in zip(names, others, strict=True)}
    return columns


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return type(value) in (int, float) and math.isfinite(value)
