"""A job watched to its end: one loop that looks at its state, its lines and its progress. Pure of clock and cloud.

Nothing that a network does ends the watch or looks like success: an end is only what the service itself said.
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
from launcher.runs.watch.events import Back, Changed, Event, JobView, Note, Outage, Printed, Tell, Went
from launcher.runs.watch.pollers import Extras, JobLook, goes_on

__all__ = [
    "Back",
    "Changed",
    "Event",
    "JobView",
    "Line",
    "Note",
    "Outage",
    "Printed",
    "Progress",
    "Watched",
    "Went",
    "watch",
]


class Watched(Struct, frozen=True):
    """How a watch ended: with the job, or because it waits for longer than it may; or it is as far as
    somebody wanted to see it."""

    job: Job
    """As it was last seen; one that was deleted has the state `jobs.GONE`."""
    why: Literal["ended", "waited", "there"]


def watch(
    view: JobView,
    tell: Tell,
    clock: Clock,
    *,
    wait_seconds: float | None,
    waited: float = 0.0,
    watch_seconds: float | None = None,
    enough: Callable[[Job], bool] = lambda _job: False,
) -> Watched:
    """Watch a job until it has ended, has waited for machines for `wait_seconds`, `waited` of them before, or is
    `enough`.

    Raises:
        StillRunning: `watch_seconds` are over. The job goes on.
        NotAuthorised: we may not ask any more. The job goes on.
        LaunchError: the first look was refused, or there is no such job.
    """
    until = clock.now() + watch_seconds if watch_seconds is not None else float("inf")
    job, extras = JobLook(view, tell, clock, waited), Extras(view, tell, clock)
    while True:
        job.look()
        if job.ended:
            extras.look_last()
            return Watched(job.ended, "ended")
        if job.last and job.waits and wait_seconds is not None and job.waited >= wait_seconds:
            return Watched(job.last, "waited")
        if job.last and enough(job.last):
            return Watched(job.last, "there")
        extras.look(waiting=job.waits)
        if clock.now() >= until:
            raise StillRunning(*goes_on(job.last, "is still"))
        clock.sleep(max(0.0, min(job.pace.due, extras.due, until) - clock.now()))
