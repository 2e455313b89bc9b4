"""Time each training step; on a GPU by events in its stream, because the host's clock would need a synchronisation."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

Times = list[tuple[float, float, float]]
"""For each step: its duration in seconds, the Unix time of its end, and the seconds until its lap (0: none)."""


def open_stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch for `device`. Also resets the peak of GPU memory, so that earlier probes don't count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return CudaStopwatch()
    # Work on the CPU is complete when the call returns.
    return Stopwatch(torch.mps.synchronize if device.type == "mps" else lambda: None)


class Stopwatch:
    """Times steps by the host's clock; on a Mac's GPU it synchronises at the end of each step."""

    def __init__(self, done: Callable[[], None]) -> None:
        """`done` returns once the device has finished."""
        self._done = done
        self._began = self._lap = 0.0
        self._times: Times = []

    def start(self) -> None:
        self._began = self._lap = time.perf_counter()

    def lap(self) -> None:
        """Mark the moment in the step after which it may wait for other ranks."""
        self._lap = time.perf_counter()

    def stop(self) -> None:
        """End the step, if one was started: its work is done, or queued on the device."""
        self._done()
        self._times.append((time.perf_counter() - self._began, time.time(), self._lap - self._began))

    def read(self) -> Times:
        """Return the steps since the last call. May wait for the device."""
        times, self._times = self._times, []
        return times


class CudaStopwatch(Stopwatch):
    """Times steps by two events each; the times are computed when a block of steps is read."""

    def __init__(self) -> None:
        self._began_at: torch.cuda.Event | None = None
        self._lap_at: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        self._began_at, self._lap_at = _record_event(), None

    def lap(self) -> None:
        self._lap_at = _record_event()

    def stop(self) -> None:
        if self._began_at:
            self._events.append((self._began_at, self._lap_at or self._began_at, _record_event()))

    def read(self) -> Times:
        events, self._events = self._events, []
        if not events:
            return []
        last = events[-1][-1]
        last.synchronize()
        now = time.time()
        return [
            (began.elapsed_time(end) / 1e3, now - end.elapsed_time(last) / 1e3, began.elapsed_time(lap) / 1e3)
            for began, lap, end in events
        ]


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
    event.record()
    return event


def memory_gb(device: torch.device) -> float:
    """Return GB (1e9 bytes): torch's peak on a GPU, its current use on a Mac's, the process's memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return _resident_bytes() / 1e9


def _resident_bytes() -> int:
    """Return the resident memory: from statm on Linux, elsewhere the peak of getrusage (in bytes on macOS)."""
    import resource

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
