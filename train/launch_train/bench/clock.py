"""How long a piece of work takes: medians of repeats after a warm-up, by CUDA's own events on a GPU."""

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
"""Repeats. A product on a large GPU takes 1.5 ms: a few of them are over before its power limit is felt."""
WARM_SECONDS: Final = 0.25
"""Of work before a GPU is measured: an idle one lets its clocks down, and needs some tenths to raise them."""


def seconds(work: Work, device: torch.device, budget: float) -> float:
    """The median time of one `work`: of as many repeats as fit `budget` seconds, at least 3 and at most 1000."""
    return statistics.median(times(work, device, repeats(warm(work, device), budget)))


def repeats(each: float, budget: float) -> int:
    """How often work of `each` seconds is measured."""
    return max(LEAST, min(MOST, round(budget / max(each, 1e-9))))


def warm(work: Work, device: torch.device) -> float:
    """Seconds of the last of some runs before it counts: one, and on a GPU as many as it takes to wake it up."""
    began = time.perf_counter()
    work()  # allocations, and the choice of kernels
    synchronize(device)
    while True:
        before = time.perf_counter()
        work()
        synchronize(device)
        now = time.perf_counter()
        if device.type != "cuda" or now - began > WARM_SECONDS:
            return now - before


def times(work: Work, device: torch.device, count: int) -> list[float]:
    """Seconds of each of `count` runs."""
    return _on_gpu(work, device, count) if device.type == "cuda" else _on_host(work, count)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_host(work: Work, count: int) -> list[float]:
    found = []
    for _ in range(count):
        before = time.perf_counter()
        work()
        found.append(time.perf_counter() - before)
    return found


def _on_gpu(work: Work, device: torch.device, count: int) -> list[float]:
    events = [_event()]
    for _ in range(count):
        work()
        events.append(_event())
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    event.record()
    return event
