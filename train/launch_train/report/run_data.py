"""Read what a run folder says of its run: plan, attempts, metrics by step, events and samples of the machines.

Rows of metrics become columns of numbers as they are read: a million rows of ten values take 80 MB.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from operator import itemgetter, lt
from typing import Any, Final

from launch_train.common import contract
from launch_train.common.errors import TrainError
from launch_train.common.storage import Storage
from launch_train.runfolder.starts import begins_after, last_valid_steps, parts_in_order

Record = Mapping[str, Any]

ENTRY: Final = re.compile(rf"^{contract.ATTEMPTS}/(\d+)(\.end|\.verdict)?\.json$")

READERS: Final = 8
"""Files read in parallel."""

LAST_PARTS: Final = 3
"""The last parts of a start that are read of a long run; the very last may have the `end` event alone."""

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
        """Add a row."""
        self.steps.append(row["step"])
        self.times.append(_number(row.get("time")))
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

    @property
    def begins_after(self) -> int | None:
        """Return the step that it resumed from; 0: from scratch; None: it has no rows and names none."""
        return begins_after(self.events, self.rows.steps[0] if self.rows.steps else None)

    def event(self, kind: str) -> Record | None:
        """Return the first event of a kind, or None."""
        return next((event for event in self.events if event["event"] == kind), None)


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt: what the launcher recorded when it asked for the machine (`entry`), and when it ended (`end`)."""

    number: int
    entry: Record
    end: Record


@dataclass(frozen=True)
class RunData:
    """A run, as its folder has it. `problems`: files that could not be read."""

    id: str
    folder: str
    plan: Record
    attempts: tuple[AttemptRecord, ...]
    starts: tuple[Start, ...]
    monitor: Mapping[int, Sequence[Record]]
    """Samples of each node, in order of time."""
    problems: tuple[str, ...] = ()
    is_running: bool | None = None
    """None: unknown."""

    @cached_property
    def begin(self) -> float:
        """Return the Unix time from which the run's time is counted: its first record. 0: none has a time."""
        times = [_number(event.get("time")) for event in self.events]
        times += [_number(samples[0]["time"]) for samples in self.monitor.values() if samples]
        times += [min(filter(math.isfinite, start.rows.times), default=math.nan) for start in self.starts]
        return min(filter(math.isfinite, times), default=0.0)

    @property
    def events(self) -> Iterator[Record]:
        """Yield the events of all starts, the oldest first."""
        for start in self.starts:
            yield from start.events

    def starts_until(self) -> Iterator[tuple[Start, float]]:
        """Yield each start, the oldest first, with the last step that no later one has repeated."""
        yield from zip(self.starts, last_valid_steps([start.begins_after for start in self.starts]), strict=True)

    def evaluations(self) -> dict[int, Record]:
        """Return the newest evaluation of each step that the run went through, in order of steps."""
        newest: dict[int, Record] = {}
        for start, last in self.starts_until():
            for event in start.events:
                if event["event"] == "eval" and type(event.get("step")) is int and is_number(event.get("loss")):
                    newest |= {event["step"]: event} if event["step"] <= last else {}
        return dict(sorted(newest.items()))

    def kept(self) -> Iterator[tuple[Start, int]]:
        """Yield each start, the oldest first, with the number of its rows that no later start has repeated."""
        for start, last in self.starts_until():
            yield start, bisect.bisect_right(start.rows.steps, last)

    def series(self) -> Columns:
        """Return the valid rows of the run: each step as the newest start that ran it has it."""
        starts = [*self.kept()]
        if len(starts) == 1:
            return starts[0][0].rows
        found = Columns()
        for start, count in starts:
            rows = start.rows
            for name in rows.values.keys() - found.values.keys():
                found.values[name] = array("d", [math.nan]) * len(found.steps)
            for name, column in found.values.items():
                more = rows.values.get(name)
                column.extend(more[:count] if more else array("d", [math.nan]) * count)
            found.steps.extend(rows.steps[:count])
            found.times.extend(rows.times[:count])
        return found


def read_run(storage: Storage, *, ends_only: bool = False) -> RunData:
    """Read a run folder. A file that is damaged or missing costs its content alone. `ends_only` reads the first and the
    last metrics of each start, and no samples of machines: enough for how a run went, and quick for a long one.

    Raises TrainError: no access.
    """
    problems: list[str] = []
    kinds = (
        (contract.METRICS, contract.ATTEMPTS) if ends_only else (contract.METRICS, contract.MONITOR, contract.ATTEMPTS)
    )
    names = {contract.MONITOR: list[str]()} | {kind: [*storage.list(f"{kind}/")] for kind in kinds}

    def read(name: str) -> bytes:
        try:
            return storage.read(name)
        except (OSError, TrainError) as error:
            problems.append(f"{name}: {error}")
            return b""

    starts: dict[tuple[int, int], Start] = {}
    monitor: dict[int, list[Record]] = {}
    with ThreadPoolExecutor(READERS) as threads:
        parts = parts_in_order(names[contract.METRICS])
        parts = _ends(parts) if ends_only else parts
        for (numbers, _), text in zip(parts, _in_turn(threads, read, [name for _, name in parts]), strict=True):
            _add_part(starts.setdefault((numbers[0], numbers[1]), Start((numbers[0], numbers[1]))), text)
        samples = parts_in_order(names[contract.MONITOR])
        for (numbers, _), text in zip(samples, _in_turn(threads, read, [name for _, name in samples]), strict=True):
            monitor.setdefault(numbers[2], []).extend(
                row for row in contract.records(text) if is_number(row.get("time"))
            )
        entries = [name for name in names[contract.ATTEMPTS] if ENTRY.match(name)]
        texts = dict(zip(entries, threads.map(read, entries), strict=True))
    for start in starts.values():
        start.rows.close()
    for rows in monitor.values():
        rows.sort(key=lambda row: row["time"])
    types = {"machine": dict, "image": dict, "attempts": list, "spec": dict}  # others can write to the folder
    values = _object(read(contract.PLAN)).items()
    plan: dict[str, Any] = {key: value for key, value in values if isinstance(value, types.get(key, object))}
    plan["attempts"] = [attempt for attempt in plan.get("attempts", ()) if isinstance(attempt, dict)]
    name = str(plan.get("run") or storage.url.rstrip("/").rpartition("/")[2])
    ordered = tuple(starts[key] for key in sorted(starts))
    return RunData(name, storage.url, plan, _attempts(texts), ordered, monitor, tuple(problems))


def _in_turn(threads: ThreadPoolExecutor, read: Callable[[str], bytes], names: Sequence[str]) -> Iterator[bytes]:
    """Yield the files' contents. A few are read ahead: all of them would fill the memory."""
    ahead: deque[Future[bytes]] = deque()
    for name in names:
        ahead.append(threads.submit(read, name))
        if len(ahead) > READERS:
            yield ahead.popleft().result()
    for one in ahead:
        yield one.result()


def _ends(parts: Sequence[tuple[tuple[int, ...], str]]) -> list[tuple[tuple[int, ...], str]]:
    """Return the first and the last parts of each start; `parts` are in order."""
    starts: dict[tuple[int, ...], list[tuple[tuple[int, ...], str]]] = {}
    for part in parts:
        starts.setdefault(part[0][:2], []).append(part)
    return [part for each in starts.values() for part in [each[0], *each[max(1, len(each) - LAST_PARTS) :]]]


def _attempts(texts: Mapping[str, bytes]) -> tuple[AttemptRecord, ...]:
    entries: dict[int, dict[str, Record]] = {}
    for name, text in texts.items():
        found = ENTRY.match(name)
        assert found is not None  # noqa: S101 - only such names were read
        entries.setdefault(int(found[1]), {})["end" if found[2] else "entry"] = _object(text)
    return tuple(
        AttemptRecord(key, entries[key].get("entry", {}), entries[key].get("end", {})) for key in sorted(entries)
    )


def _add_part(start: Start, text: bytes) -> None:
    if alike := _alike(text):
        start.rows.extend(alike)
        return
    records = contract.records(text)
    start.events += [record for record in records if isinstance(record.get("event"), str)]
    rows = [record for record in records if "event" not in record]
    try:
        start.rows.extend(_columns(rows))
    except (IndexError, KeyError, TypeError, ValueError, OverflowError):
        for row in rows:
            if type(row.get("step")) is int and abs(row["step"]) < LARGEST_STEP:
                start.rows.add(row)


def _alike(text: bytes) -> Columns | None:
    """Return the rows of a part if they have the same values, all of them numbers, and msgspec is there: `launch` has
    it, a training image may not. This is twice as fast as `_columns`."""
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


def _columns(rows: Sequence[Record]) -> Columns:
    """Return rows that have the same keys as columns, which is faster than adding each row.

    Raises IndexError, KeyError, TypeError, ValueError and OverflowError if they are not alike, or no numbers.
    """
    names = rows[0].keys() - NOT_VALUES
    if {*map(len, rows)} != {len(names) + 2}:
        raise ValueError("rows with different columns")
    steps, times, *others = zip(*map(itemgetter("step", "time", *names), rows), strict=True)
    if {*map(type, steps)} != {int} or any(not {*map(type, column)} <= {int, float} for column in others):
        raise TypeError("a value that is no number")
    found = Columns()
    found.steps, found.times = array("q", steps), array("d", times)
    if not all(math.isfinite(sum(column)) for column in (times, *others)):
        raise ValueError("a value that is infinite or no number")
    found.values = {name: array("d", column) for name, column in zip(names, others, strict=True)}
    return found


def _object(text: bytes) -> dict[str, Any]:
    return next(iter(contract.records(text.replace(b"\n", b" "))), {})


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and no bool."""
    return type(value) in (int, float) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if is_number(value) else math.nan
