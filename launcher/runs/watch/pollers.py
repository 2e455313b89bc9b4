"""The looks that a watch is made of: when each is due, what it counts, and how its trouble is told."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised
from launcher.gcp.api import UnreachableError, retry_after, status_of
from launcher.jobs.job import GONE, WAITING, Job
from launcher.runs.watch.events import Back, Changed, JobView, Note, Outage, Printed, Sight, Tell, Went

JOB_EVERY: Final = (2.0, 10.0)
"""Seconds between two looks at the job: at first, and when nothing happens."""
LINES_EVERY: Final = (5.0, 60.0)
"""Cloud Logging lets a project read 60 times a minute, all its users together: https://cloud.google.com/logging/quotas.
The longer one is for when that is too much."""
LINES_WAITING: Final = 30.0
"""While nothing runs, only Vertex AI itself may have something to say."""
PROGRESS_EVERY: Final = (10.0, 60.0)
QUEUED_SECONDS: Final = 120.0
"""After which a QUEUED job is told as what that may be."""
REFUSED_SECONDS: Final = 300.0
"""A token lives for an hour and a job for days: so long somebody may take to renew one."""
EXTRA_SECONDS: Final = 60.0
"""Lines and progress are extras: that they can't be read is told after so long."""
MOST: Final = 300.0
"""Seconds that a service may ask us to stay away."""
CONFIRMED: Final = 3
"""Answers in a row that a job isn't there, or that we may not ask, until it is believed."""
LAST_SECONDS, LAST_EVERY = 30.0, 3.0
"""After the end: how long lines may still come in, and how often is looked."""
KNOWN: Final = {
    "CANCELLING": "",
    "RUNNING": "",
    "STOPPED": "",  # a VM to work on
    "PAUSED": "Vertex AI has paused it. That is no end: it is watched on.",
    "UPDATING": "Vertex AI is changing it; it may run meanwhile. It is watched on.",
}
"""States that are neither waiting nor an end, with what is told of them."""


class Pace:
    """When the next look is due: `shortest` seconds after the last, up to `longest` when there is reason for that."""

    def __init__(self, clock: Clock, shortest: float, longest: float) -> None:
        self._clock = clock
        self._shortest, self._longest = shortest, longest
        self._every = shortest
        self.due = clock.now()

    @property
    def is_due(self) -> bool:
        """Whether it is time."""
        return self._clock.now() >= self.due

    def again(self, factor: float, least: float = 0.0) -> None:
        """Look again after `factor` times the pause before, and not before `least` seconds are over."""
        self._every = min(max(self._every * factor, self._shortest), self._longest)
        self.due = self._clock.now() + max(self._every, min(least, MOST))

    def soon(self) -> None:
        """Something has happened: look as often as ever."""
        self._every = self._shortest
        self.due = self._clock.now() + self._every

    def now(self) -> None:
        """Look at once."""
        self._every, self.due = self._shortest, self._clock.now()


class Trouble:
    """Looks that fail in a row: told once when that begins, and once when it is over."""

    def __init__(self, sight: Sight, tell: Tell, clock: Clock, patience: float) -> None:
        self._sight, self._tell, self._clock, self._patience = sight, tell, clock, patience
        self._told: set[str] = set()
        self.since: float | None = None

    def goes_on(self, error: LaunchError, kind: str = "away") -> None:
        """Another look has failed. One that is refused asks for something else than one that gets no answer: each
        kind is told."""
        now = self._clock.now()
        self.since = now if self.since is None else self.since
        if now - self.since >= self._patience and kind not in self._told:
            self._told.add(kind)
            self._tell(Outage(self.since, str(error), self._sight))

    def is_over(self) -> None:
        """A look has worked."""
        if self._told and self.since is not None:
            self._tell(Back(self._clock.now() - self.since, self._sight))
        self.since = None
        self._told.clear()


class JobLook:
    """Looks at the job's state."""

    def __init__(self, view: JobView, tell: Tell, clock: Clock, waited: float) -> None:
        self._view, self._tell, self._clock = view, tell, clock
        self._trouble = Trouble("job", tell, clock, 0.0)
        self._seen_at = self._changed_at = clock.now()
        self._missing = self._refused = 0
        self._refused_since = 0.0
        self._noted: set[str] = set()
        self.pace = Pace(clock, *JOB_EVERY)
        self.waited = waited
        """Seconds in QUEUED and PENDING since it last ran."""
        self.last: Job | None = None
        self.ended: Job | None = None

    @property
    def waits(self) -> bool:
        """Whether it waited for machines when it was last seen."""
        return self.last is not None and self.last.is_waiting

    def look(self) -> None:
        """Look if it is time. Raises NotAuthorised, LaunchError: see `watch`."""
        if not self.pace.is_due:
            return
        try:
            job = self._view.job()
        except LaunchError as error:
            self._fails(error)
        else:
            self._sees(job)

    def _sees(self, job: Job) -> None:
        self._missing = self._refused = 0
        self._trouble.is_over()
        before = self.last
        self._count(job)
        self.last = job
        if before is None or before.state != job.state:
            self._changed_at = self._clock.now()
            self.pace.soon()
            self._tell(Changed(job, before.state if before else None))
        else:
            self.pace.again(1.25)
        self._explain(job)
        if job.has_ended or (job.ended is not None and not is_known(job)):
            self.ended = job

    def _count(self, job: Job) -> None:
        """Waiting counts from one look that sees it to the next. A job that has run before, and was not watched then,
        waits since a time that nobody knows."""
        now = self._clock.now()
        if (self.last is None and job.started is not None) or job.state == "RUNNING":
            self.waited = 0.0
        elif self.last and self.last.is_waiting and job.is_waiting:
            self.waited += now - self._seen_at
        self._seen_at = now

    def _explain(self, job: Job) -> None:
        """What a state may mean, once each."""
        if job.state == "QUEUED" and self._clock.now() - self._changed_at >= QUEUED_SECONDS:
            self._note(job, "Vertex AI waits for machines; or for quota: it queues for want of that too.")
        elif not is_known(job):
            self._note(job, "that state is unknown here. It is watched on." if job.ended is None else "it has ended.")
        elif KNOWN.get(job.state):
            self._note(job, KNOWN[job.state])

    def _note(self, job: Job, text: str) -> None:
        if job.state not in self._noted:
            self._noted.add(job.state)
            self._tell(Note(f"{job.state or 'no state'}: {text}"))

    def _fails(self, error: LaunchError) -> None:
        self.pace.again(1.25, retry_after(error))
        if isinstance(error, UnreachableError):
            self._missing = 0
            self._trouble.goes_on(error)
        elif status_of(error) == 404:
            self._is_missing(error)
        else:
            self._is_refused(error)

    def _is_missing(self, error: LaunchError) -> None:
        """A new job may take a moment until all of Google's servers know of it."""
        self._missing += 1
        if self._missing < CONFIRMED:
            return
        if self.last is None:
            raise error
        self.ended = replace(self.last, state=GONE)
        self._tell(Changed(self.ended, self.last.state))

    def _is_refused(self, error: LaunchError) -> None:
        """Who has never been let in isn't either now; who was may be again, with fresh credentials."""
        if self.last is None:
            raise error
        self._missing = 0
        self._refused += 1
        if self._refused == 1:
            self._refused_since = self._clock.now()
        self._trouble.goes_on(error, "refused")
        if self._refused >= CONFIRMED and self._clock.now() - self._refused_since >= REFUSED_SECONDS:
            what, hint = goes_on(self.last, "was last seen")
            raise NotAuthorised(f"{error.problem}\n{what}", "\n".join(filter(None, (error.hint, hint)))) from error


def is_known(job: Job) -> bool:
    """Whether its state is one that we know."""
    return job.has_ended or job.state in WAITING or job.state in KNOWN


class Extras:
    """Looks at lines and progress. Whatever goes wrong with them, the watch goes on."""

    def __init__(self, view: JobView, tell: Tell, clock: Clock) -> None:
        self._view, self._tell, self._clock = view, tell, clock
        self._lines, self._progress = Pace(clock, *LINES_EVERY), Pace(clock, *PROGRESS_EVERY)
        self._lines_trouble = Trouble("lines", tell, clock, EXTRA_SECONDS)
        self._progress_trouble = Trouble("progress", tell, clock, EXTRA_SECONDS)
        self._waiting = False

    @property
    def due(self) -> float:
        """When the next look is due, by the watch's clock."""
        return min(self._lines.due, self._progress.due)

    def look(self, *, waiting: bool) -> None:
        """Look at what it is time for."""
        if self._waiting and not waiting:
            self._lines.now()
            self._progress.now()
        self._waiting = waiting
        if self._lines.is_due:
            self._look_at_lines()
        if self._progress.is_due:
            self._look_at_progress()

    def look_last(self) -> None:
        """The job has ended: its last lines may come in late."""
        until, quiet = self._clock.now() + LAST_SECONDS, 0
        while quiet < 2:
            quiet = quiet + 1 if self._look_at_lines() == 0 else 0
            if self._clock.now() + LAST_EVERY > until:
                break
            if quiet < 2:
                self._clock.sleep(LAST_EVERY)
        if self._lines_trouble.since is not None:
            self._tell(Note("its last lines could not be read: launch logs may show them later"))
        elif quiet < 2:
            self._tell(Note("more lines still come in: launch logs shows all"))
        self._look_at_progress()

    def _look_at_lines(self) -> int | None:
        """How many were new; None: that can't be known now."""
        try:
            lines = self._view.lines()
        except LaunchError as error:
            self._lines.again(2, retry_after(error))
            self._lines_trouble.goes_on(error)
            return None
        self._lines_trouble.is_over()
        self._lines.again(0.5, LINES_WAITING if self._waiting else 0.0)
        if lines:
            self._tell(Printed(lines))
        return len(lines)

    def _look_at_progress(self) -> None:
        try:
            progress = self._view.progress()
        except LaunchError as error:
            self._progress.again(2)
            self._progress_trouble.goes_on(error)
            return
        self._progress_trouble.is_over()
        self._progress.again(0.5, LINES_WAITING if self._waiting else 0.0)
        if progress is not None:
            self._tell(Went(progress))


def goes_on(job: Job | None, is_still: str) -> tuple[str, str]:
    """Problem and hint where a watch ends before its job does."""
    if job is None:
        return "the job could not be looked at", "launch status shows what is there."
    hint = f"It goes on. launch follow {job.run or job.name} watches it further."
    return f"{job.name} {is_still} {job.state}", hint
