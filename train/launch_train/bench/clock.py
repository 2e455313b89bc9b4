"""Time work: the median of repeats after a warm-up, measured with CUDA events on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import torch

Work = Callable[[], object]

LEAST: Final = 3
MOST: Final = 1000
"""Bounds of the repeats. A matrix product on a large GPU takes 1.5 ms: a few would finish before power throttling."""
WARM_SECONDS: Final = 0.25
"""Warm-up before measuring a GPU: an idle GPU lowers its clocks, and needs some tenths of a second to raise them."""


def seconds(work: Work, device: torch.device, budget: float) -> float:
    """Return the median seconds of one `work`, from 3 to 1000 repeats, as many as fit into `budget` seconds."""
    return statistics.median(times(work, device, repeats(warm(work, device), budget)))


def repeats(each: float, budget: float) -> int:
    """Return the number of repeats for work that takes `each` seconds."""
    return max(LEAST, min(MOST, round(budget / max(each, 1e-9))))


def warm(work: Work, device: torch.device) -> float:
    """Warm up, on a GPU for WARM_SECONDS, and return the seconds of the last run."""
    began = time.perf_counter()
    work()  # includes allocations and kernel selection
    synchronize(device)
    while True:
        before = time.perf_counter()
        work()
        synchronize(device)
        now = time.perf_counter()
        if device.type != "cuda" or now - began > WARM_SECONDS:
            return now - before


def times(work: Work, device: torch.device, count: int) -> list[float]:
    """Return the seconds of each of `count` runs."""
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(count):
            work()
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]  # torch leaves it untyped
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
