"""Events that a watch reports, and the interface by which it polls a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from launcher.jobs.job import Job
from launcher.runs.logs.reader import Line
from launcher.runs.metrics.progress import Progress

PollTarget = Literal["job", "lines", "progress"]


class StateChanged(Struct, frozen=True):
    """The job's state changed. `previous` is None on the first poll."""

    job: Job
    previous: str | None


class LinesPrinted(Struct, frozen=True):
    """The job printed at least one new line."""

    lines: list[Line]


class ProgressUpdated(Struct, frozen=True):
    """The run's metrics show new progress."""

    progress: Progress


class OutageStarted(Struct, frozen=True):
    """Polls of `target` fail. `since` is a time on the watch's clock, `problem` says why and what to do."""

    since: float
    problem: str
    target: PollTarget = "job"


class OutageEnded(Struct, frozen=True):
    """A reported outage of `target` ended after `seconds`."""

    seconds: float
    target: PollTarget = "job"


class Note(Struct, frozen=True):
    """A sentence for the user."""

    text: str


Event = StateChanged | LinesPrinted | ProgressUpdated | OutageStarted | OutageEnded | Note
EventSink = Callable[[Event], None]


class JobView(Protocol):
    """The three things that a watch polls. Each method raises LaunchError; UnreachableError where a retry may help."""

    def job(self) -> Job:
        """Return the job's current state."""

    def lines(self) -> list[Line]:
        """Return the lines printed since the last call, in order."""

    def progress(self) -> Progress | None:
        """Return the progress; None: nothing new since the last call."""
