"""Watch a job until it ends: one loop that polls its state, its lines and its progress.

A network error neither ends the watch nor counts as success: only the service's own answer ends it. The clock and all
access to the cloud are passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from launcher.clock import Clock
from launcher.errors import StillRunning
from launcher.jobs.job import Job
from launcher.runs.logs.reader import Line
from launcher.runs.metrics.progress import Progress
from launcher.runs.watch.events import (
    Event,
    EventSink,
    JobView,
    LinesPrinted,
    Note,
    OutageEnded,
    OutageStarted,
    ProgressUpdated,
    StateChanged,
)
from launcher.runs.watch.pollers import CLOUD, Intervals, JobPoller, OutputPoller, still_running_text

__all__ = [
    "Event",
    "JobView",
    "Line",
    "LinesPrinted",
    "Note",
    "OutageEnded",
    "OutageStarted",
    "Progress",
    "ProgressUpdated",
    "StateChanged",
    "WatchResult",
    "watch",
]


class WatchResult(Struct, frozen=True):
    """The job at the end of a watch, and why the watch ended."""

    job: Job
    """The last known state; `jobs.GONE` for a deleted job."""
    reason: Literal["ended", "wait_limit", "stop_condition"]


def watch(
    view: JobView,
    report: EventSink,
    clock: Clock,
    *,
    wait_seconds: float | None,
    waited: float = 0.0,
    watch_seconds: float | None = None,
    stop_when: Callable[[Job], bool] = lambda _job: False,
    intervals: Intervals = CLOUD,
) -> WatchResult:
    """Watch a job until it ends, `stop_when` is true, or it has waited `wait_seconds` for machines.

    `waited`: the part of `wait_seconds` that was used before this watch.

    Raises:
        StillRunning: `watch_seconds` have passed; the job is still running.
        NotAuthorised: access was withdrawn; the job is still running.
        LaunchError: the first poll was refused, or the job does not exist.
    """
    until = clock.now() + watch_seconds if watch_seconds is not None else float("inf")
    job = JobPoller(view, report, clock, waited, intervals)
    output = OutputPoller(view, report, clock, intervals)
    while True:
        job.poll()
        if job.ended:
            output.poll_last()
            return WatchResult(job.ended, "ended")
        if job.last and job.is_waiting and wait_seconds is not None and job.waited >= wait_seconds:
            return WatchResult(job.last, "wait_limit")
        if job.last and stop_when(job.last):
            return WatchResult(job.last, "stop_condition")
        output.poll(waiting=job.is_waiting)
        if clock.now() >= until:
            raise StillRunning(*still_running_text(job.last, "is still"))
        clock.sleep(max(0.0, min(job.schedule.due, output.due, until) - clock.now()))
