"""What a watch tells of a job, and what it looks at the job with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from launcher.jobs.job import Job
from launcher.runs.logs.reader import Line
from launcher.runs.metrics.progress import Progress

Sight = Literal["job", "lines", "progress"]
"""What is looked at."""


class Changed(Struct, frozen=True):
    """The job's state is another one. `before` is None at the first look."""

    job: Job
    before: str | None


class Printed(Struct, frozen=True):
    """New lines, at least one."""

    lines: list[Line]


class Went(Struct, frozen=True):
    """The job is further than it was."""

    progress: Progress


class Outage(Struct, frozen=True):
    """Something can't be looked at, since a time by the watch's clock. `what` says why, and what to do; `of` is the
    kind of look."""

    since: float
    what: str
    of: Sight = "job"


class Back(Struct, frozen=True):
    """The outage that was told is over, after so many seconds."""

    seconds: float
    of: Sight = "job"


class Note(Struct, frozen=True):
    """A sentence for whoever watches."""

    text: str


Event = Changed | Printed | Went | Outage | Back | Note
Tell = Callable[[Event], None]


class JobView(Protocol):
    """What to look with. Each raises LaunchError, and its kind UnreachableError where nothing is wrong but the way."""

    def job(self) -> Job:
        """The job as its service sees it now."""

    def lines(self) -> list[Line]:
        """The lines that are new, in their order."""

    def progress(self) -> Progress | None:
        """How far it is; None: nothing new."""
