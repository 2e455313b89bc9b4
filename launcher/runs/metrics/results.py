"""Parse a run's metrics from the parts in its folder. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from launch_train.common import contract
from launch_train.runfolder.starts import begins_after, last_valid_steps, parts_in_order

Record = Mapping[str, Any]
Key = tuple[int, int]
"""Attempt (from 1) and generation (from 0). They identify one start of the processes."""


class Start(Struct, frozen=True, kw_only=True):
    """The metrics of one start of the processes: rows by step, and events."""

    key: Key
    rows: Mapping[int, Record]
    events: tuple[Record, ...]

    @property
    def begins_after(self) -> int | None:
        """Return the step it resumed from (0: from scratch); None: unknown before its first event or step."""
        return begins_after(self.events, min(self.rows, default=None))

    @property
    def preempted_at(self) -> int | None:
        """Return the step at which it was preempted, if it was and logged that."""
        steps = (event.get("step") for event in self.events if event["event"] == "preempted")
        return next((step for step in steps if isinstance(step, int)), None)


class Resumption(Struct, frozen=True, kw_only=True):
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


class Results(Struct, frozen=True, kw_only=True):
    """All starts of a run, the oldest first."""

    starts: tuple[Start, ...]

    @property
    def rows(self) -> tuple[Record, ...]:
        """Return the valid row of each step, in order."""
        rows: dict[int, Record] = {}
        limits = last_valid_steps([start.begins_after for start in self.starts])
        for start, last in zip(self.starts, limits, strict=True):
            rows |= {step: row for step, row in start.rows.items() if step <= last}
        return tuple(rows[step] for step in sorted(rows))

    @property
    def events(self) -> tuple[Record, ...]:
        """Return the events of all starts, oldest first."""
        return tuple(event for start in self.starts for event in start.events)

    @property
    def nonfinite(self) -> dict[str, dict[str, int]]:
        """Return, for each value that was ever nan or infinite, its first such step and the number of such steps.
        Steps that the trainer skipped don't count: events report them."""
        found: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for name in () if "skipped" in row else contract.nonfinite(row):
                found.setdefault(name, {"first_step": row["step"], "steps": 0})["steps"] += 1
        return found

    def event(self, kind: str) -> Record | None:
        """Return the last event of a kind since the newest `start` event, or None."""
        for event in reversed(self.events):
            if event["event"] in (kind, "start"):
                return event if event["event"] == kind else None
        return None

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
        reached = max((step for start in starts[:cut] for step in start.rows), default=None)
        return Resumption(stopped_at=reached if begun else None, resumed_from=resumed_from)


def figure(record: Record, name: str) -> float | int | None:
    """Return a record's number of that name, including nan and infinities; None if it has none."""
    value = record.get(name)
    if value is None and (lost := contract.nonfinite(record).get(name)):
        return float(lost)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def results(parts: Mapping[str, bytes]) -> Results:
    """Parse parts by name (`metrics/<attempt>-<generation>-<node>-<part>[-<variant>].jsonl`); skip other names."""
    rows: dict[Key, dict[int, Record]] = {}
    events: dict[Key, list[Record]] = {}
    for numbers, name in parts_in_order(parts):
        key = (numbers[0], numbers[1])
        start_rows, start_events = rows.setdefault(key, {}), events.setdefault(key, [])
        for record in contract.records(parts[name]):
            if "event" in record:
                start_events.append(record)
            elif isinstance(record.get("step"), int):
                start_rows[record["step"]] = record
    return Results(starts=tuple(Start(key=key, rows=rows[key], events=tuple(events[key])) for key in rows))
