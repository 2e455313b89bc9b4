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

from launch_train.profiling.intervals import Interval, union

STEP = "ProfilerStep#"
"""Prefix of torch.profiler's name for a step, which lasts from one call of its step() to the next."""

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
"""Ranges that the training loop marks in each step."""

ASIDE = ("evaluation", "checkpoint")
"""Ranges outside training, excluded from the analysis."""

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_HOST = frozenset({"cpu_op", "user_annotation"})


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
        self.host = sorted(host, key=_order)
        self.calls = sorted(calls, key=_order)
        self.device = sorted(device, key=_order)

    @cached_property
    def steps(self) -> list[Event]:
        """Return the recorded steps in order."""
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


def _order(event: Event) -> tuple[float, float]:
    """Sort by begin, outer events before the events inside them."""
    return event.begin, -event.end


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
    host, calls, device = [], [], []
    for each in events:
        kind = each.get("cat")
        if each.get("ph") != "X":
            continue
        if kind in _HOST:
            host.append(_event(each))
        elif kind in _CALLS:
            calls.append(_event(each))
        elif kind in _DEVICE:
            device.append(_event(each))
    return Trace(host, calls, device)


def _event(each: Mapping[str, Any]) -> Event:
    begin, arguments = float(each["ts"]), each.get("args") or {}
    duration = max(0.0, float(each.get("dur") or 0.0))
    correlation = int(arguments.get("correlation") or 0)
    return Event(str(each.get("name", "")), begin, begin + duration, (each.get("pid"), each.get("tid")), correlation)
