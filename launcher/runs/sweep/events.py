"""The points of a running sweep, and the events that report their changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from launcher.errors import LaunchError
from launcher.jobs.job import Job
from launcher.runs.endings import RunEnded
from launcher.runs.sweep.plan import SweepPoint

State = Literal["waiting", "active", "succeeded", "failed", "cancelled", "unknown"]


class PointRun(Struct, kw_only=True):
    """A point and its current state."""

    point: SweepPoint
    state: State = "waiting"
    job: Job | None = None
    error: LaunchError | None = None
    """Why it failed."""
    cause: str = ""
    """The error in its job's output, if it was read."""
    had_ended: bool = False
    """It had ended before this command came to it."""
    ended: float | None = None
    """Unix time of that end; None: unknown."""

    @property
    def has_ended(self) -> bool:
        """Return whether nothing is left to do."""
        return self.state not in ("waiting", "active")


class PointChanged(Struct, frozen=True, kw_only=True):
    """A point was started or has ended, or its job's state has changed."""

    run: PointRun
    kind: Literal["started", "found", "state", "ended"]


OnEvent = Callable[[PointChanged], None]


def cause_of(run: PointRun) -> str:
    """Return why a point failed, without its run's name, so that the causes of several points can be compared."""
    if isinstance(run.error, RunEnded):
        return run.cause or run.error.diagnosis.cause
    return run.error.problem.replace(run.point.run, "RUN") if run.error else ""
