"""When each step began and ended. On a GPU by events in its own stream: asking the host's clock would need a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

Times = list[tuple[float, float]]
"""For each step: how long it took in seconds, and the Unix time at which it ended."""


class Stopwatch(Protocol):
    def start(self) -> None:
        """A step begins."""

    def stop(self) -> None:
        """It has ended, or its work is queued on the device."""

    def read(self) -> Times:
        """The steps since the last reading. May wait for the device."""


def stopwatch(device: torch.device) -> Stopwatch:
    """For the steps to come. The peak of a GPU's memory is theirs too, and not that of the probe before them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return CudaStopwatch()
    return HostStopwatch(torch.mps.synchronize if device.type == "mps" else _at_once)


def _at_once() -> None:
    """A CPU has done what it was told when the call returns."""


class HostStopwatch:
    """The host does the work, so its clock says when it was done; for a Mac's GPU it waits at the end of each step."""

    def __init__(self, done: Callable[[], None]) -> None:
        """`done` returns when the device has done what it was given."""
        self._done = done
        self._began = 0.0
        self._times: Times = []

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._done()
        self._times.append((time.perf_counter() - self._began, time.time()))

    def read(self) -> Times:
        times, self._times = self._times, []
        return times


class CudaStopwatch:
    """Two events a step; the times come out when a block of steps is read."""

    def __init__(self) -> None:
        self._began: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._began = _recorded()

    def stop(self) -> None:
        """A step that broke off has no end, and leaves no pair behind."""
        if self._began:
            self._events.append((self._began, _recorded()))

    def read(self) -> Times:
        events, self._events = self._events, []
        if not events:
            return []
        last = events[-1][1]
        last.synchronize()
        now = time.time()
        return [(a.elapsed_time(b) / 1e3, now - b.elapsed_time(last) / 1e3) for a, b in events]


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def memory_gb(device: torch.device) -> float:
    """GB (1e9 bytes): the peak that torch allocated on a GPU; what it holds now on a Mac's; on the CPU the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return _resident_bytes() / 1e9


def _resident_bytes() -> int:
    """Linux: the second number of statm, in pages. Elsewhere the peak that getrusage knows (bytes on macOS)."""
    import resource

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
