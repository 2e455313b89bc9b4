"""Find what limits a run's speed, from a trace of a few steps. Standard library only.

Each moment is attributed to one cause. On a GPU, the first of these that the device does at that moment: computing,
optimizer kernels, kernels that only move memory, communication (exposed: no computing at the same time), copies to and
from the host. The rest is idle time, attributed to what the host does: it waits for data, allocates device memory, has
waited for the device and thereby let it run out of work, or launches kernels too slowly. On a CPU, a moment is
attributed to what the training thread does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from launch_train.profiling import kernel_categories
from launch_train.profiling.trace import (
    ASIDE,
    OPTIMIZER,
    PHASES,
    Event,
    Interval,
    Times,
    Trace,
    intersect,
    length,
    subtract,
    union,
)

Cause = Literal[
    "input", "compute", "communication", "memory", "launch_overhead", "host_sync", "optimizer", "allocation", "other"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""communication: exposed; memory: elementwise operators, norms and copies; allocation: of device memory by the driver;
other: outside the steps' own work."""

TINY = 8.0
"""Microseconds; a CPU operator that takes less time is mostly call overhead."""

MOST_KERNELS = 15


class Kernel(NamedTuple):
    """The kernels of one name, or on a CPU the operators: time in seconds and calls per step."""

    name: str
    seconds: float
    calls: float


class Analysis(NamedTuple):
    """Share of time by cause (sums to 1), the number of steps and the seconds of one; `gpu`: device work was recorded.

    `sync_outside` is the share of host_sync time outside the forward, backward and optimizer passes; `copying` is the
    share of input time spent in copies to the device.
    """

    shares: Mapping[Cause, float]
    steps: int
    seconds: float
    gpu: bool
    sync_outside: float = 0.0
    copying: float = 0.0
    launches: int = 0
    """Kernel launches per step."""
    kernels: tuple[Kernel, ...] = ()
    """Those that take the most time, the longest first. Kernels overlap, so their sum may exceed a step."""

    @property
    def bound(self) -> Cause:
        return max(CAUSES, key=lambda cause: self.shares[cause])


def analyse(trace: Trace, steps: int | None = None) -> Analysis | None:
    """Attribute the time of the first `steps` steps (None: all). Returns None if the trace has no complete step."""
    if steps is not None:
        trace = trace.first(steps)
    if not trace.steps:
        return None
    return _of_gpu(trace) if trace.device else _of_cpu(trace)


class _Account:
    """Attributes time: each moment goes to the first cause that claims it."""

    def __init__(self, times: Times) -> None:
        self.whole = length(times)
        self.left = list(times)
        self.given: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)

    def give(self, cause: Cause, times: Times) -> float:
        """Attribute these times, as far as they are unclaimed, to `cause`. Returns their length in microseconds."""
        part = length(intersect(self.left, times))
        self.left = subtract(self.left, times)
        self.given[cause] += part
        return part

    def shares(self) -> dict[Cause, float]:
        """Return the share of each cause; unclaimed time is `other`. If there is no time at all, `other` is 1."""
        other = length(self.left)
        whole = sum(self.given.values()) + other
        if not whole:
            return {**self.given, "other": 1.0}
        return {cause: (time + (other if cause == "other" else 0.0)) / whole for cause, time in self.given.items()}


# --- With a GPU -----------------------------------------------------------------------------------------------------


def _of_gpu(trace: Trace) -> Analysis:
    first = _first_on_device(trace)
    # From the first device event of the first step to that of the last step: whole periods, even if the host runs
    # ahead. With a single step, to the end of all work.
    firsts = [begin for begin in map(first, trace.steps) if begin is not None]
    if len(firsts) > 1 and firsts[-1] > firsts[0]:
        window, periods = Interval(firsts[0], firsts[-1]), len(firsts) - 1
    else:
        end = max(trace.steps[-1].end, *(event.end for event in trace.device))
        window, periods = Interval(min(trace.steps[0].begin, trace.device[0].begin), end), len(trace.steps)
    aside = union(
        Interval(event.begin if (begin := first(event)) is None else begin, event.end)
        for event in trace.host
        if event.name in ASIDE
    )
    account = _Account(subtract([window], aside) or [window])
    kinds = _by_kind(trace)
    for cause in ("compute", "optimizer", "memory", "communication"):
        account.give(cause, kinds[cause])
    copying = account.give("input", kinds["to_device"])
    copied = account.give("host_sync", kinds["to_host"])
    idle = account.left
    account.give("input", union(event.span for event in trace.host if kernel_categories.is_batch_wait(event.name)))
    account.give("allocation", union(call.span for call in _calls(trace, kernel_categories.ALLOCATIONS)))
    # Idle gaps that start during a host sync: the host waited, so the device ran out of work.
    waiting = _Within(union(sync.span for sync in _calls(trace, kernel_categories.SYNCS)))
    dry = [gap for gap in idle if waiting(gap.begin)]
    inside = account.give("host_sync", intersect(dry, trace.ranges(*PHASES))) + copied
    outside = account.give("host_sync", dry)
    operators = (event.span for event in trace.host if event.name in PHASES or "::" in event.name)
    account.give("launch_overhead", union([*operators, *(call.span for call in trace.calls)]))
    device = [event for event in trace.device if window.begin <= event.begin < window.end]
    return Analysis(
        account.shares(),
        len(trace.steps),
        account.whole / periods / 1e6,
        gpu=True,
        sync_outside=outside / ((inside + outside) or 1.0),
        copying=copying / (account.given["input"] or 1.0),
        launches=len(device) // periods,
        kernels=_costliest(((event.name, event.end - event.begin) for event in device), periods),
    )


def _first_on_device(trace: Trace) -> Callable[[Event], float | None]:
    """Return a function from a step to the start of the first device event that it launched, or None."""
    launched = sorted(
        (trace.launches[event.correlation].begin, event.begin)
        for event in trace.device
        if event.correlation in trace.launches
    )
    return lambda step: min((at for call, at in launched if step.begin <= call < step.end), default=None)


def _by_kind(trace: Trace) -> dict[str, list[Interval]]:
    """Return the busy times of the device by kind. Kernels launched in the optimizer's range count as optimizer."""
    spans: dict[str, list[Interval]] = {
        kind: [] for kind in ("compute", "optimizer", "memory", "communication", "to_device", "to_host")
    }
    optimizer = _Within(trace.ranges(OPTIMIZER))
    for event in trace.device:
        kind, call = kernel_categories.kernel(event.name), trace.launches.get(event.correlation)
        if kind in ("compute", "memory") and call and optimizer(call.begin):
            kind = "optimizer"
        spans[kind].append(event.span)
    return {kind: union(each) for kind, each in spans.items()}


class _Within:
    """Tests whether a moment is in a set of times."""

    def __init__(self, times: Times) -> None:
        self._begins = [begin for begin, _ in times]
        self._times = times

    def __call__(self, moment: float) -> bool:
        place = bisect_right(self._begins, moment) - 1
        return place >= 0 and moment < self._times[place].end


def _calls(trace: Trace, names: Iterable[str]) -> list[Event]:
    """Return the calls with these names by threads that launch kernels; a loader's threads delay nothing."""
    busy = {trace.launches[event.correlation].thread for event in trace.device if event.correlation in trace.launches}
    wanted = frozenset(names)
    return [call for call in trace.calls if call.name in wanted and (call.thread in busy or not busy)]


# --- On a CPU -------------------------------------------------------------------------------------------------------


def _of_cpu(trace: Trace) -> Analysis:
    window = subtract(union(step.span for step in trace.steps), trace.ranges(*ASIDE))
    account = _Account(window)
    spans = _by_cause(trace, trace.steps[0].thread)
    for cause, times in spans.items():
        account.give(cause, times)
    within, own_times = _Within(window), dict[Event, float]()  # without that of operators inside
    for span, stack in _moments(event for event in trace.host if event.thread == trace.steps[0].thread):
        if _calculates(stack) and within(span.begin):
            own_times[stack[-1]] = own_times.get(stack[-1], 0.0) + span.end - span.begin
    syncs, count = spans["host_sync"], len(trace.steps)
    outside = length(subtract(syncs, trace.ranges(*PHASES))) / (length(syncs) or 1.0)
    return Analysis(
        account.shares(),
        count,
        account.whole / count / 1e6,
        gpu=False,
        sync_outside=outside,
        kernels=_costliest(((event.name, time) for event, time in own_times.items()), count),
    )


def _by_cause(trace: Trace, thread: Any) -> dict[Cause, list[Interval]]:
    """Attribute the time of the training thread.

    While it is idle and other threads communicate, the time is communication. Idle time right before it reads a value
    is the cost of that read (host_sync).
    """
    spans: dict[Cause, list[Interval]] = {cause: [] for cause in CAUSES}
    idle: list[Interval] = []
    own = [event for event in trace.host if event.thread == thread]
    reads = {event.begin for event in own if event.name in kernel_categories.READS}
    for span, stack in _moments(own):
        cause = _cause(stack)
        if cause in ("launch_overhead", "other") and not _calculates(stack):
            idle.append(span)
            cause = "host_sync" if span.end in reads else cause
        spans[cause].append(span)
    talks = union(event.span for event in trace.host if kernel_categories.is_communication(event.name))
    waits = intersect(union(idle), talks)
    return {cause: subtract(union(times), waits) for cause, times in spans.items()} | {
        "communication": union([*spans["communication"], *waits])
    }


def _costliest(times: Iterable[tuple[str, float]], steps: int) -> tuple[Kernel, ...]:
    """Return the kernels that took the most time. `times`: name and microseconds of each call in `steps` steps."""
    totals: dict[str, list[float]] = {}
    for name, time in times:
        totals.setdefault(name, []).append(time)
    longest = sorted(totals, key=lambda name: -sum(totals[name]))[:MOST_KERNELS]
    return tuple(Kernel(name, sum(totals[name]) / steps / 1e6, len(totals[name]) / steps) for name in longest)


def _moments(events: Iterable[Event]) -> Iterator[tuple[Interval, list[Event]]]:
    """Split the time of one thread where events begin or end; yield each piece with its events, innermost last.

    `events` must be sorted, outer events before inner ones.
    """
    stack: list[Event] = []
    at = 0.0
    for event in events:
        while stack and stack[-1].end <= event.begin:
            if stack[-1].end > at:
                yield Interval(at, stack[-1].end), stack
                at = stack[-1].end
            stack.pop()
        if stack and event.begin > at:
            yield Interval(at, event.begin), stack
        at = max(at, event.begin) if stack else event.begin
        stack.append(event)
    while stack:
        if stack[-1].end > at:
            yield Interval(at, stack[-1].end), stack
            at = stack[-1].end
        stack.pop()


def _cause(stack: list[Event]) -> Cause:
    names = [event.name for event in stack]
    for cause, belongs in _FIRST:
        if any(map(belongs, names)):
            return cause
    if _calculates(stack):
        innermost = stack[-1]
        if innermost.name.startswith(_COMPILED) or any(map(kernel_categories.is_matrix, names)):
            return "compute"
        tiny = innermost.end - innermost.begin <= TINY or innermost.name in kernel_categories.VIEWS
        return "launch_overhead" if tiny else "memory"
    return "launch_overhead" if not {*PHASES}.isdisjoint(names) else "other"


_FIRST: tuple[tuple[Cause, Callable[[str], bool]], ...] = (
    ("input", kernel_categories.is_batch_wait),
    ("communication", kernel_categories.is_communication),
    ("optimizer", lambda name: name == OPTIMIZER or name.startswith("Optimizer.step#")),
    ("host_sync", kernel_categories.READS.__contains__),
)


def _calculates(stack: list[Event]) -> bool:
    """Return whether the innermost event computes. Autograd's events only wrap others; their own time is overhead."""
    return stack[-1].name.startswith(("aten::", "mkldnn::", "quantized::", _COMPILED))


_COMPILED = "Torch-Compiled Region"
"""Event of a compiled region; Inductor's loops have no separate events."""
