"""Where a run's time and money went: the time of each attempt, split into parts whose sum is the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Final

from launch_train.runfolder.run import AttemptRecord, RunData
from launch_train.runfolder.starts import Start, is_number

QUEUE: Final = "queue"
PARTS: Final = ("train", "lost", "evaluate", "checkpoint", "startup", "restart", "other")
"""The parts of paid time. train: steps that count; lost: steps that a later start had to repeat; checkpoint: training
waits for a save; startup: from the machine's start to the first step (image, imports, data, compilation); restart: the
same after a failure within an attempt; other: what remains, such as the end of the processes. `queue` is not paid."""

UNSEEN: Final = 1.0
"""Seconds between steps that are too short to be seen on the timeline."""


@dataclass(slots=True)
class Span:
    """A stretch of time in Unix seconds, for the timeline. It grows while rows are added."""

    part: str
    begin: float
    end: float


@dataclass(frozen=True)
class AttemptTime:
    """The time of one attempt: `parts` in seconds (paid ones and `queue`), `spans` for the timeline.

    `usd_per_hour`: the plan's price of its machines; None: unknown.
    """

    number: int
    place: str
    parts: Mapping[str, float]
    spans: tuple[Span, ...]
    end: str
    usd_per_hour: float | None

    @property
    def paid(self) -> float:
        return sum(self.parts[part] for part in PARTS)

    @property
    def usd(self) -> float | None:
        """Return the cost of the paid seconds; None: the price is unknown."""
        return None if self.usd_per_hour is None else self.paid / 3600 * self.usd_per_hour


def attempt_times(run: RunData, now: float) -> tuple[AttemptTime, ...]:
    """Return the time of each attempt. An attempt without an end lasts until the newest record of it, or `now` if it
    has none."""
    kept = {start.key: count for start, count in run.kept()}
    starts: dict[int, list[Start]] = {attempt.number: [] for attempt in run.attempts}
    for start in run.starts:
        starts.setdefault(start.key[0], []).append(start)
    recorded = {attempt.number: attempt for attempt in run.attempts}
    attempts = [recorded.get(number, AttemptRecord(number, {}, {})) for number in sorted(starts)]
    return tuple(_time_of(run, attempt, starts[attempt.number], kept, now) for attempt in attempts)


def goodput(times: Sequence[AttemptTime]) -> float | None:
    """Return the productive share of paid time; None: no step was timed, as in a script without metrics."""
    paid = sum(attempt.paid for attempt in times)
    is_known = any(attempt.parts["train"] + attempt.parts["lost"] > 0 for attempt in times)
    return sum(attempt.parts["train"] for attempt in times) / paid if paid > 0 and is_known else None


def total_usd(times: Sequence[AttemptTime]) -> float | None:
    """Return the cost of all attempts; None: the price of one with paid time is unknown."""
    costs = [attempt.usd for attempt in times if attempt.paid > 0]
    return None if None in costs else sum(cost for cost in costs if cost is not None)


def _time_of(
    run: RunData, attempt: AttemptRecord, starts: Sequence[Start], kept: Mapping[Any, int], now: float
) -> AttemptTime:
    parts = dict.fromkeys((QUEUE, *PARTS), 0.0)
    spans: list[Span] = []
    created = _seconds(attempt.entry.get("time"))
    end = _seconds(attempt.end.get("time")) or max(map(_last_record, starts), default=0.0) or created or now
    is_local = run.plan.get("target") == "local" or attempt.entry.get("region") == "local"
    begin = min(created, end) if is_local and created and not attempt.end else _begin(attempt, starts, end)
    billed, waited = (_seconds(attempt.end.get(key)) for key in ("billed", "waited"))
    if created and billed and waited:  # exact; the end's own time is when a launcher noticed it
        begin, end = created + waited, created + waited + billed
    if created and begin > created and not is_local:
        parts[QUEUE] = begin - created
        spans.append(Span(QUEUE, created, begin))
    at = begin
    for number, start in enumerate(starts):
        at = _add_start(start, kept[start.key], "restart" if number else "startup", (at, end), parts, spans)
    if end > at:
        spans.append(Span("other", at, end))
    paid = max(0.0, end - begin)
    parts["other"] = max(0.0, paid - sum(parts[part] for part in PARTS if part != "other"))
    entry, cause = attempt.entry, str(attempt.end.get("cause") or "")
    place = ", ".join(str(entry[key]) for key in ("machine", "provisioning", "region") if entry.get(key))
    place = "this machine" if is_local else place
    return AttemptTime(attempt.number, place, parts, tuple(spans), cause, price_per_hour(run.plan, entry))


def _begin(attempt: AttemptRecord, starts: Sequence[Start], end: float) -> float:
    """Return when the attempt's machines began to cost money, as far as it is recorded."""
    paid = _seconds(attempt.end.get("billed")) or _seconds(attempt.end.get("seconds"))
    if paid:
        return end - paid
    if "kind" in attempt.end and not starts:  # a launcher recorded the end of a job that never had a machine
        return end
    created = _seconds(attempt.entry.get("time"))
    if created and (waited := _seconds(attempt.end.get("waited"))):
        return min(created + waited, end)
    firsts = [_seconds(event.get("time")) for start in starts for event in start.events[:1]]
    firsts += [time for start in starts for time in start.rows.times[:1]]
    return min((time for time in firsts if time > 0), default=0.0) or created or end


def _add_start(
    start: Start,
    kept: int,
    before: str,
    within: tuple[float, float],
    parts: dict[str, float],
    spans: list[Span],
) -> float:
    """Add the time of one start to the parts and spans, `within` the end of what was before and that of the attempt;
    return its end."""
    (at, latest), rows = within, start.rows
    durations = rows.values.get("step_s", repeat(math.nan))
    evaluated = [_seconds(event.get("time")) for event in start.events if event["event"] in ("eval", "samples")]
    marks = sorted((min(time, latest) for time in evaluated if time), reverse=True)
    first = True
    for place, (ended, length) in enumerate(zip(rows.times, durations, strict=False)):
        if ended != ended:  # noqa: PLR0124 - true only for NaN; a million math.isnan calls are slow
            continue
        time = ended if ended < latest else latest
        while marks and marks[-1] <= time:
            at = _add("evaluate", at, marks.pop(), parts, spans)
        between = time - at
        if between <= 0:
            continue
        other = 0.0
        if length < between:
            other = between - length
        elif length != length and first:  # noqa: PLR0124 - NaN, in a script's row: the time before may be no step's
            other = between
        part = "train" if place < kept else "lost"
        if other < UNSEEN and not first and (last := spans[-1]).part == part:  # as most steps: it adds to a span
            parts["other"] += other
            parts[part] += between - other
            last.end = at = time
            continue
        at = _add(before if first else "other", at, at + other, parts, spans)  # compilation is part of the first
        at = _add(part, at, time, parts, spans)
        first = False
    for last_mark in reversed(marks):
        at = _add("evaluate", at, last_mark, parts, spans)
    blocked = sum(_seconds(event.get("blocked")) for event in start.events if event["event"] == "checkpoint")
    parts["checkpoint"] += min(blocked, parts["other"])
    parts["other"] -= min(blocked, parts["other"])
    return at


def _add(part: str, begin: float, end: float, parts: dict[str, float], spans: list[Span]) -> float:
    """Add a stretch of time and return its end. Neighbours of the same part are one span on the timeline."""
    if end <= begin:
        return begin
    parts[part] += end - begin
    if part == "other" and end - begin < UNSEEN and spans:
        part = spans[-1].part
    if spans and (last := spans[-1]).part == part and last.end == begin:
        last.end = end
    else:
        spans.append(Span(part, begin, end))
    return end


def price_per_hour(plan: Mapping[str, Any], entry: Mapping[str, Any]) -> float | None:
    """Return USD per hour of the placement that an attempt was made at."""
    for placement in plan.get("attempts") or ():
        same = {"machine_type": entry.get("machine"), "provisioning": entry.get("provisioning")}
        if placement.get("region") == entry.get("region") and all(placement.get(key) == same[key] for key in same):
            price = placement.get("usd_per_hour")
            nodes = (plan.get("machine") or {}).get("nodes", 1)
            return float(price) * nodes if type(price) in (int, float) else None
    return None


def _last_record(start: Start) -> float:
    times = [_seconds(event.get("time")) for event in start.events]
    return max(filter((0.0).__lt__, chain(times, start.rows.times)), default=0.0)


def _seconds(value: Any) -> float:
    return float(value) if is_number(value) else 0.0
