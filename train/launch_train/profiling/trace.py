"""Read a trace of torch.profiler in Chrome's format. Standard library only.

Times are microseconds of one clock. Kineto's `cat` is an event's kind: cpu_op and user_annotation for work of a thread
(including record_function ranges), cuda_runtime and cuda_driver for CUDA calls, kernel, gpu_memcpy and gpu_memset for
work of the device. A call and the device work that it started have the same `correlation`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

STEP = "ProfilerStep#"
"""Prefix of torch.profiler's name for a step, which lasts from one call of its step() to the next."""

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
"""Ranges that the training loop marks in each step."""

ASIDE = ("evaluation", "checkpoint")
"""Ranges outside training, excluded from the analysis."""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation")


class Interval(NamedTuple):
    """Half-open interval from `begin` to `end`, with begin < end."""

    begin: float
    end: float


Times = Sequence[Interval]
"""A set of times as `union` returns it: sorted, and each span ends before the next begins."""


class Event(NamedTuple):
    """Work of a thread or a stream; `correlation` is 0 if there is none."""

    name: str
    begin: float
    end: float
    thread: Any
    correlation: int = 0

    @property
    def span(self) -> Interval:
        return Interval(self.begin, self.end)


class Trace:
    """Events of one process: host work, CUDA calls and device work."""

    def __init__(self, host: Iterable[Event], calls: Iterable[Event] = (), device: Iterable[Event] = ()) -> None:
        # By begin, outer events before the events inside them.
        self.host, self.calls, self.device = (
            sorted(events, key=lambda event: (event.begin, -event.end)) for events in (host, calls, device)
        )

    @cached_property
    def steps(self) -> list[Event]:
        return [event for event in self.host if event.name.startswith(STEP)]

    def first(self, steps: int) -> Trace:
        """Return a trace with only the first `steps` steps."""
        late = frozenset(self.steps[steps:])
        return Trace([event for event in self.host if event not in late], self.calls, self.device)

    @cached_property
    def launches(self) -> dict[int, Event]:
        """Return the calls that started device work, by correlation."""
        return {call.correlation: call for call in self.calls if call.correlation}

    def ranges(self, *names: str) -> list[Interval]:
        """Return the times in which a thread was in one of these ranges."""
        return union(event.span for event in self.host if event.name in names)


def read(path: Path) -> Trace:
    """Read a .json or .json.gz file. Raises OSError, and ValueError if it is not a trace."""
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("not a torch.profiler trace: not JSON") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"it was cut off, or is damaged: {error}") from error
    if isinstance(document, list):
        document = {"traceEvents": document}
    if not isinstance(document, Mapping) or not isinstance(document.get("traceEvents"), list):
        raise ValueError("not a torch.profiler trace: no traceEvents")
    try:
        return parse(document["traceEvents"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a torch.profiler trace: unexpected event ({error})") from error


def parse(events: Sequence[Mapping[str, Any]]) -> Trace:
    """Parse the `traceEvents` of a trace; skip incomplete events and kinds that the analysis does not use."""
    host, calls, device = list[Event](), list[Event](), list[Event]()
    lists = {**dict.fromkeys(_HOST, host), **dict.fromkeys(_CALLS, calls), **dict.fromkeys(_DEVICE, device)}
    for item in events:
        kept = lists.get(item.get("cat", ""))
        if item.get("ph") == "X" and kept is not None:
            begin, end = float(item["ts"]), float(item["ts"]) + max(0.0, float(item.get("dur") or 0.0))
            thread, correlation = (item.get("pid"), item.get("tid")), (item.get("args") or {}).get("correlation")
            kept.append(Event(str(item.get("name", "")), begin, end, thread, int(correlation or 0)))
    return Trace(host, calls, device)


# --- Sets of times ----------------------------------------------------------------------------------------------------


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the union of spans, which may be unsorted, overlapping or empty."""
    merged: list[Interval] = []
    for begin, end in sorted(span for span in spans if span.end > span.begin):
        if merged and begin <= merged[-1].end:
            merged[-1] = Interval(merged[-1].begin, max(end, merged[-1].end))
        else:
            merged.append(Interval(begin, end))
    return merged


def intersect(times: Times, other: Times) -> list[Interval]:
    common: list[Interval] = []
    i = j = 0
    while i < len(times) and j < len(other):
        begin, end = max(times[i].begin, other[j].begin), min(times[i].end, other[j].end)
        if begin < end:
            common.append(Interval(begin, end))
        if times[i].end < other[j].end:
            i += 1
        else:
            j += 1
    return common


def subtract(times: Times, other: Times) -> list[Interval]:
    """Return the times in `times` but not in `other`."""
    left: list[Interval] = []
    j = 0
    for begin, end in times:
        while j < len(other) and other[j].end <= begin:
            j += 1
        k = j
        while k < len(other) and other[k].begin < end:
            if other[k].begin > begin:
                left.append(Interval(begin, other[k].begin))
            begin = max(begin, other[k].end)  # noqa: PLW2901 - the rest of the span
            k += 1
        if begin < end:
            left.append(Interval(begin, end))
    return left


def length(times: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in times)
