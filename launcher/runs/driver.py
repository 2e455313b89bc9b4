"""Drive one run: submit attempt after attempt and watch each, until the run ends or this launch stops following it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Protocol

from msgspec import Struct

from launcher.backend.base import Service
from launcher.backend.request import provisioning, tried_by
from launcher.clock import REAL, Clock
from launcher.diagnosis import Diagnosis, exit_code, of_end
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, StillRunning, UsageError
from launcher.jobs.job import GONE, Job
from launcher.plan.model import Plan
from launcher.runs.attempts import wait_left
from launcher.runs.endings import cancel_and_confirm, release_resources, settle
from launcher.runs.ledger import Ledger
from launcher.runs.submission import Submitted, submit
from launcher.runs.watch.loop import Event, JobView, watch
from launcher.text import exact_duration

FLEX_SLACK_SECONDS = 120.0
"""A flex-start request has its own wait limit. This margin lets Google end the job first, with a reason."""


class AttemptStarted(Struct, frozen=True, kw_only=True):
    """An attempt has a job."""

    job: Job
    number: int
    created: bool
    """True: this launch created the job; False: it existed."""


class AttemptFailed(Struct, frozen=True, kw_only=True):
    """An attempt ended without success."""

    job: Job
    number: int
    diagnosis: Diagnosis


class Watcher(Protocol):
    """The driver's access to jobs, and the receiver of its events."""

    def view(self, job: Job, number: int) -> JobView:
        """Return the view by which to poll a job."""

    def report(self, event: Event | AttemptStarted | AttemptFailed) -> None:
        """Report an event to the user."""

    def error_in_output(self) -> str:
        """Return the error in the newest job's output, or an empty string."""


def never(_job: Job) -> bool:
    """The stop condition of a watch until the job's end."""
    return False


class RunDriver(Struct, frozen=True, kw_only=True):
    """Drive one run through its attempts until it ends."""

    plan: Plan
    service: Service
    ledger: Ledger
    watcher: Watcher
    say: Callable[[str], None]
    ready: Callable[[Plan], Plan]
    """Return the plan with its image pushed to the registry. Called before the first job is created."""
    clock: Clock = REAL

    def submit(self, *, fresh: bool, resume: bool = False) -> Submitted:
        """Return the run's active job; create one if there is none. Raises LaunchError: see `submit`."""
        return submit(
            self.plan,
            self.service,
            self.ledger,
            self.clock,
            self.say,
            fresh=fresh,
            resume=resume,
            ready=self.ready,
        )

    def drive(
        self, *, fresh: bool, resume: bool = False, detach: bool = False, watch_seconds: float | None = None
    ) -> Job:
        """Run attempts until one succeeds, and return its job; with `detach`, return once a job exists.

        Raises:
            RunEnded: the run had already ended.
            JobFailed, NoCapacity, NotAuthorised, LaunchError: the run failed; each error says what to do.
            StillRunning: `watch_seconds` have passed; the job is still running.
        """
        until = self.clock.now() + watch_seconds if watch_seconds is not None else None
        while True:
            submitted = self.submit(fresh=fresh, resume=resume)
            job, number = submitted.job, submitted.number
            self.watcher.report(AttemptStarted(job=job, number=number, created=submitted.created))
            if detach and job.zone is None:
                return job
            job, diagnosis = self.watch_attempt(job, number, until, stop_when=is_created if detach else never)
            if diagnosis is None or diagnosis.kind == "succeeded":
                return job
            self.watcher.report(AttemptFailed(job=job, number=number, diagnosis=diagnosis))
            if ends_run(diagnosis):
                raise end_error(job, diagnosis)
            fresh = resume = False

    def drive_until_running(self, *, fresh: bool) -> tuple[Job, bool]:
        """Return a workstation VM that runs (or exists and is stopped), and whether it was created now. Without an
        existing one, tries zone after zone. Raises as `drive` does."""
        created = False
        while True:
            submitted = self.submit(fresh=fresh)
            job, number = submitted.job, submitted.number
            created, fresh = created or submitted.created, False
            self.watcher.report(AttemptStarted(job=job, number=number, created=submitted.created))
            job, diagnosis = self.watch_attempt(job, number, stop_when=is_up)
            if diagnosis is None:
                return job, created
            self.watcher.report(AttemptFailed(job=job, number=number, diagnosis=diagnosis))
            if ends_run(diagnosis):
                raise end_error(job, diagnosis)

    def watch_attempt(
        self, job: Job, number: int, until: float | None = None, stop_when: Callable[[Job], bool] = never
    ) -> tuple[Job, Diagnosis | None]:
        """Watch one attempt until its end, and return the job with its recorded diagnosis; None: `stop_when` became
        true before. Raises as `watch` does."""
        wait = self.wait_limit(job, number)
        left = until - self.clock.now() if until is not None else None
        waited = self.seconds_since_creation(job) if wait is not None else 0.0
        view = self.watcher.view(job, number)
        watched = watch(
            view,
            self.watcher.report,
            self.clock,
            wait_seconds=wait,
            waited=waited,
            watch_seconds=left,
            stop_when=stop_when,
        )
        if watched.reason == "stop_condition":
            return watched.job, None
        if watched.reason == "wait_limit":
            return self.cancel_waiting_job(watched.job, number, wait or 0.0)
        diagnosis = self.record_end(watched.job, number)
        release_resources(self.service, watched.job, self.say)
        return watched.job, diagnosis

    def seconds_since_creation(self, job: Job) -> float:
        """Return the seconds since a job's creation; 0 if the bucket can't be read, which is no reason not to watch."""
        try:
            return self.ledger.seconds_since(job.created)
        except LaunchError:
            return 0.0

    def record_end(self, job: Job, number: int) -> Diagnosis:
        """Record how a job ended, and return the diagnosis that is valid for the run.

        If the end can't be recorded, the next launch finds it in the job.
        """
        diagnosis = of_end(job, tried_by(job, self.plan.project), self.watcher.error_in_output())
        try:
            return settle(self.ledger, number, job, diagnosis).diagnosis
        except LaunchError as error:
            unsure = ", or check whether this job was a duplicate" if diagnosis.kind == "succeeded" else ""
            self.say(f"could not record the end of attempt {number}{unsure}: {error.problem}")
            return diagnosis

    def wait_limit(self, job: Job, number: int) -> float | None:
        """Return how many seconds the attempt may wait for machines: its own limit, or what earlier attempts left of
        `limits.wait_total` if that is less. None: no limit."""
        kind = provisioning(job.request).partition(":")[0]
        same_kind = (one.wait_seconds for one in self.plan.attempts if one.provisioning.partition(":")[0] == kind)
        own, left = next(same_kind, self.plan.limits.wait_seconds), self.wait_total_left(number)
        limits = [limit for limit in (own, left) if limit is not None]
        if not limits:
            return None
        return min(limits) + (FLEX_SLACK_SECONDS if kind == "flex-start" else 0.0)

    def wait_total_left(self, number: int) -> float | None:
        """Return the seconds of `limits.wait_total` that earlier attempts of the round left; all of them if the ledger
        can't be read; None: no such limit."""
        try:
            entries = self.ledger.entries() if self.plan.limits.wait_total_seconds else ()
        except LaunchError:
            entries = ()
        rounds = {one.number: one.round for one in entries}
        return wait_left(self.plan, [one for one in entries if one.number < number and one.round == rounds.get(number)])

    def cancel_waiting_job(self, job: Job, number: int, wait: float) -> tuple[Job, Diagnosis]:
        """Cancel a job that waited too long. Raises StillRunning: the reason can't be recorded or the end can't be
        confirmed, so no attempt may follow.

        The reason is recorded first, so that no other launch takes this for a cancellation by the user.
        """
        left = self.wait_total_left(number)
        limit = "limits.wait_total" if left is not None and left <= wait else "limits.wait"
        cause = f"{job.state} for {exact_duration(wait)}, longer than {limit} allows"
        fix = f"To wait longer: --set {limit}={2 * ceil(wait / 3600)}h"
        diagnosis = Diagnosis(scope="region+provisioning", kind="waited", cause=cause, fix=fix)
        try:
            settle(self.ledger, number, job, diagnosis, wait)
        except LaunchError as error:
            problem = f"{job.name} is {cause}, but was not cancelled: could not record the reason: {error.problem}"
            raise StillRunning(
                problem, f"To try again: launch follow {job.run}. To end it: launch cancel {job.run}"
            ) from error
        self.say(f"{cause}; cancelling the job")
        ended = cancel_and_confirm(self.service, job, self.clock, self.say)
        if ended.state in ("CANCELLED", GONE):
            release_resources(self.service, ended, self.say)
            return ended, diagnosis
        return ended, self.record_end(ended, number)  # it ended before it was cancelled


def ends_run(diagnosis: Diagnosis) -> bool:
    """Return whether another attempt can't help."""
    return diagnosis.scope in ("permanent", "project") and diagnosis.kind != "lost"


def is_up(job: Job) -> bool:
    """Return whether a VM no longer waits for a machine."""
    return not job.is_waiting


def is_created(job: Job) -> bool:
    """Return whether a VM exists: it is up, or queued by flex-start."""
    return is_up(job) or provisioning(job.request) == "flex-start"


def end_error(job: Job, diagnosis: Diagnosis) -> LaunchError:
    """Return the error, with its exit code, for a run that ended without success."""
    kinds = (UsageError, JobFailed, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == exit_code(diagnosis)), LaunchError)
    if job.is_workplace:  # it has no logs and no checkpoint
        return kind(f"{job.run}: {diagnosis.cause}", diagnosis.fix)
    logs = f"launch logs {job.handle}"
    hints = [*([diagnosis.fix] if diagnosis.fix not in ("", logs) else []), f"{logs} shows all of its output"]
    if "--resume" not in diagnosis.fix:
        hints.append(f"launch {'vm' if job.zone else 'vertex'} --resume {job.handle} resumes from there")
    return kind(f"{job.run}: {diagnosis.cause}", "\n".join(hints))
