"""What a run's metrics say, read from the parts in its folder. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct


class Results(Struct, frozen=True, kw_only=True):
    """The rows of a run: for each step the newest attempt's and generation's, and the events of the newest start."""

    rows: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]

    def event(self, kind: str) -> Mapping[str, Any] | None:
        """The last event of a kind, or None."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)


def results(parts: Mapping[str, bytes]) -> Results:
    """Read parts by name (`metrics/<attempt>-<generation>-<node>-<part>.jsonl`).

    The names sort in the order of writing, so a later row of the same step replaces an earlier one.
    """
    rows: dict[int, Mapping[str, Any]] = {}
    events: list[Mapping[str, Any]] = []
    for name in sorted(parts):
        for record in records(parts[name]):
            if record.get("event") == "start":
                events = []
            if "event" in record:
                events.append(record)
            elif isinstance(record.get("step"), int):
                rows[record["step"]] = record
    return Results(rows=tuple(rows[step] for step in sorted(rows)), events=tuple(events))


def records(text: bytes) -> Iterator[Mapping[str, Any]]:
    """The JSON objects of one part; a line that isn't one (cut off by a crash) is passed over."""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None
