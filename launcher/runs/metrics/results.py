"""What a run's metrics say, read from the parts in its folder. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from launch_train.common import contract

PART = re.compile(rf"^{contract.METRICS}/(\d+)-(\d+)-(\d+)-(\d+)(?:-(\d+))?\.jsonl$")
"""The name of a part: attempt, generation, node, part; and a variant, where the name had been taken."""

Record = Mapping[str, Any]
Key = tuple[int, int]
"""Attempt (from 1) and generation (from 0): one start of the processes."""


class Start(Struct, frozen=True, kw_only=True):
    """What one start of the processes wrote: its rows by step, and its events."""

    key: Key
    rows: Mapping[int, Record]
    events: tuple[Record, ...]

    @property
    def begins_after(self) -> int | None:
        """The step it went on from (0: from the beginning); None while it has neither said so nor made a step."""
        resumed = self._step_of("resumed")
        return min(self.rows) - 1 if resumed is None and self.rows else resumed

    @property
    def preempted_at(self) -> int | None:
        """The step it was stopped at, if it was and could say so."""
        return self._step_of("preempted")

    def _step_of(self, kind: str) -> int | None:
        steps = [event.get("step") for event in self.events if event["event"] == kind]
        return next((step for step in steps if isinstance(step, int)), None)


class Resumption(Struct, frozen=True, kw_only=True):
    """How the run went on after it was stopped. None is unknown."""

    stopped_at: int | None
    """The last step before the stop."""
    resumed_from: int | None
    """The step whose state it went on from; 0 is the beginning."""

    @property
    def lost(self) -> int | None:
        """Steps that had to be made again."""
        if self.stopped_at is None or self.resumed_from is None:
            return None
        return self.stopped_at - self.resumed_from


class Results(Struct, frozen=True, kw_only=True):
    """All starts of a run, the oldest first."""

    starts: tuple[Start, ...]

    @property
    def rows(self) -> tuple[Record, ...]:
        """For each step the row of the newest attempt and generation, in the order of the steps.

        Where a start went on from below what an older one had reached, the older rows beyond it are history: the
        run's state is that of the newest start.
        """
        rows: dict[int, Record] = {}
        for start in self.starts:
            after = start.begins_after
            if after is not None:
                rows = {step: row for step, row in rows.items() if step <= after}
            rows |= start.rows
        return tuple(rows[step] for step in sorted(rows))

    @property
    def events(self) -> tuple[Record, ...]:
        """The events of the whole run, the oldest first."""
        return tuple(event for start in self.starts for event in start.events)

    @property
    def nonfinite(self) -> dict[str, dict[str, int]]:
        """Of each value that was nan or infinite in a row: the first such step, and in how many steps it was. Steps
        that the trainer skipped are not among them: it has events for these."""
        found: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for name in () if "skipped" in row else contract.nonfinite(row):
                found.setdefault(name, {"first_step": row["step"], "steps": 0})["steps"] += 1
        return found

    def event(self, kind: str) -> Record | None:
        """The last event of a kind since the newest `start`, or None."""
        for event in reversed(self.events):
            if event["event"] in (kind, "start"):
                return event if event["event"] == kind else None
        return None

    def resumption(self, attempt: int) -> Resumption:
        """How an attempt went on after its last stop, as far as its events and rows tell.

        Processes that were killed say nothing of it: then the last start that has begun is held against all before.
        """
        starts = [start for start in self.starts if start.key[0] == attempt]
        stops = [number for number, start in enumerate(starts, start=1) if start.preempted_at is not None]
        begun = [number for number, start in enumerate(starts) if number and start.begins_after is not None]
        cut = max(stops) if stops else max(begun, default=len(starts))
        resumed_from = next((start.begins_after for start in starts[cut:] if start.begins_after is not None), None)
        if stops:
            return Resumption(stopped_at=starts[cut - 1].preempted_at, resumed_from=resumed_from)
        reached = max((step for start in starts[:cut] for step in start.rows), default=None)
        return Resumption(stopped_at=reached if begun else None, resumed_from=resumed_from)


def figure(record: Record, name: str) -> float | int | None:
    """The number of that name, nan and infinities included; None where the record has none."""
    value = record.get(name)
    if value is None and (lost := contract.nonfinite(record).get(name)):
        return float(lost)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def results(parts: Mapping[str, bytes]) -> Results:
    """Read parts by name (`metrics/<attempt>-<generation>-<node>-<part>[-<variant>].jsonl`); other names are passed
    over."""
    named = sorted((tuple(map(int, found.groups("0"))), name) for name in parts if (found := PART.match(name)))
    rows: dict[Key, dict[int, Record]] = {}
    events: dict[Key, list[Record]] = {}
    for numbers, name in named:
        key = (numbers[0], numbers[1])
        kept, told = rows.setdefault(key, {}), events.setdefault(key, [])
        for record in records(parts[name]):
            if "event" in record:
                told.append(record)
            elif isinstance(record.get("step"), int):
                kept[record["step"]] = record
    return Results(starts=tuple(Start(key=key, rows=rows[key], events=tuple(events[key])) for key in rows))


def records(text: bytes) -> Iterator[Record]:
    """The JSON objects of one part; a line that isn't one (cut off by a crash) is passed over."""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
