"""A run from its plan to its end: one attempt after the other, each watched, as long as this launch follows."""

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
"""For flex-start the request says itself how long it may wait: Google's own end comes first, and says why."""


class AttemptStarted(Struct, frozen=True, kw_only=True):
    """An attempt is under way."""

    job: Job
    number: int
    made: bool
    """Whether this launch made it; else it was found."""


class AttemptFailed(Struct, frozen=True, kw_only=True):
    """An attempt has ended, and not well."""

    job: Job
    number: int
    diagnosis: Diagnosis


class Watcher(Protocol):
    """Who looks at jobs, and who is told."""

    def view(self, job: Job, number: int) -> JobView:
        """What to look at a job with."""

    def tell(self, event: Event | AttemptStarted | AttemptFailed) -> None:
        """Something has happened."""

    def said(self) -> str:
        """The error that the job's output has named, if it has."""


def never(_job: Job) -> bool:
    """Only the end is enough."""
    return False


class RunDriver(Struct, frozen=True, kw_only=True):
    """Drive one run through its attempts until it ends."""

    plan: Plan
    service: Service
    ledger: Ledger
    watcher: Watcher
    say: Callable[[str], None]
    ready: Callable[[Plan], Plan]
    """The plan with its image in the registry, once something is to be created."""
    clock: Clock = REAL

    def submit(self, *, fresh: bool, resume: bool = False) -> Submitted:
        """The run's active job, made if there is none. Raises LaunchError: see `submit`."""
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
        """Attempt after attempt until the run has ended well; with `detach`, only until a job is there.

        Raises:
            RunEnded: there was nothing to do.
            JobFailed, NoCapacity, NotAuthorised, LaunchError: how it ended instead; each says what to do.
            StillRunning: `watch_seconds` are over. The job goes on.
        """
        until = self.clock.now() + watch_seconds if watch_seconds is not None else None
        while True:
            got = self.submit(fresh=fresh, resume=resume)
            self.watcher.tell(AttemptStarted(job=got.job, number=got.number, made=got.made))
            if detach and got.job.zone is None:
                return got.job
            job, diagnosis = self.watch_attempt(got.job, got.number, until, enough=is_created if detach else never)
            if diagnosis is None:
                return job
            if diagnosis.kind == "succeeded":
                return job
            self.watcher.tell(AttemptFailed(job=job, number=got.number, diagnosis=diagnosis))
            if ends_run(diagnosis):
                raise end_error(job, diagnosis)
            fresh = resume = False

    def drive_until_running(self, *, fresh: bool) -> tuple[Job, bool]:
        """Return a VM to work on that runs (or exists, and was stopped), created zone after zone if there is none; and
        whether it was created. Raises as `drive` does."""
        made = False
        while True:
            got = self.submit(fresh=fresh)
            made, fresh = made or got.made, False
            self.watcher.tell(AttemptStarted(job=got.job, number=got.number, made=got.made))
            job, diagnosis = self.watch_attempt(got.job, got.number, enough=is_up)
            if diagnosis is None:
                return job, made
            self.watcher.tell(AttemptFailed(job=job, number=got.number, diagnosis=diagnosis))
            if ends_run(diagnosis):
                raise end_error(job, diagnosis)

    def watch_attempt(
        self, job: Job, number: int, until: float | None = None, enough: Callable[[Job], bool] = never
    ) -> tuple[Job, Diagnosis | None]:
        """Watch one attempt to its end, and what that means, as it is noted; None: it goes on, and is `enough`. Raises
        as `watch` does."""
        wait = self.wait_limit(job, number)
        left = until - self.clock.now() if until is not None else None
        waited = self.seconds_since_creation(job) if wait is not None else 0.0
        view = self.watcher.view(job, number)
        watched = watch(
            view, self.watcher.tell, self.clock, wait_seconds=wait, waited=waited, watch_seconds=left, stop_when=enough
        )
        if watched.reason == "stop_condition":
            return watched.job, None
        if watched.reason == "wait_limit":
            return self.cancel_waiting_job(watched.job, number, wait or 0.0)
        diagnosis = self.record_end(watched.job, number)
        release_resources(self.service, watched.job, self.say)
        return watched.job, diagnosis

    def seconds_since_creation(self, job: Job) -> float:
        """Seconds since a job's creation; 0 where the bucket does not say: the job is watched all the same."""
        try:
            return self.ledger.since(job.created)
        except LaunchError:
            return 0.0

    def record_end(self, job: Job, number: int) -> Diagnosis:
        """What a job's end means. A duplicate that succeeded has done nothing: the next look finds the job that works.

        An end that can't be noted is one all the same: whoever looks next finds it in the job.
        """
        diagnosis = of_end(job, tried_by(job, self.plan.project), self.watcher.said())
        try:
            return settle(self.ledger, number, job, diagnosis).diagnosis
        except LaunchError as error:
            unsure = "; nor whether it was this job that did the work" if diagnosis.kind == "succeeded" else ""
            self.say(f"how attempt {number} ended can't be noted{unsure}: {error.problem}")
            return diagnosis

    def wait_limit(self, job: Job, number: int) -> float | None:
        """Seconds that the attempt may wait for machines: its own limit, or what the run's attempts before it have left
        of `limits.wait_total`. None: no limit."""
        kind = provisioning(job.request).partition(":")[0]
        alike = (one.wait_seconds for one in self.plan.attempts if one.provisioning.partition(":")[0] == kind)
        own, left = next(alike, self.plan.limits.wait_seconds), self.wait_total_left(number)
        limits = [limit for limit in (own, left) if limit is not None]
        if not limits:
            return None
        return min(limits) + (FLEX_SLACK_SECONDS if kind == "flex-start" else 0.0)

    def wait_total_left(self, number: int) -> float | None:
        """Seconds of `limits.wait_total` that the attempts of the round before this one have left; the whole where they
        can't be read; None: there is no such limit."""
        try:
            entries = self.ledger.entries() if self.plan.limits.wait_total_seconds else ()
        except LaunchError:
            entries = ()
        rounds = {one.number: one.round for one in entries}
        return wait_left(self.plan, [one for one in entries if one.number < number and one.round == rounds.get(number)])

    def cancel_waiting_job(self, job: Job, number: int, wait: float) -> tuple[Job, Diagnosis]:
        """Cancel a job that has waited too long. Raises StillRunning: that can't be noted, or not be confirmed, so
        nothing may follow it.

        The diagnosis is noted first: whoever finds the job cancelled must not take it for a user's cancellation.
        """
        left = self.wait_total_left(number)
        limit = "limits.wait_total" if left is not None and left <= wait else "limits.wait"
        cause = f"{job.state} for {exact_duration(wait)}, longer than {limit} allows"
        fix = f"A longer wait: --set {limit}={2 * ceil(wait / 3600)}h"
        diagnosis = Diagnosis(scope="region+provisioning", kind="waited", cause=cause, fix=fix)
        try:
            settle(self.ledger, number, job, diagnosis, wait)
        except LaunchError as error:
            problem = f"{job.name} is {cause}, and goes on waiting: why it ends can't be noted: {error.problem}"
            raise StillRunning(
                problem, f"launch follow {job.run} tries again; launch cancel {job.run} ends it"
            ) from error
        self.say(f"{cause}: cancelling it")
        ended = cancel_and_confirm(self.service, job, self.clock, self.say)
        if ended.state in ("CANCELLED", GONE):
            release_resources(self.service, ended, self.say)
            return ended, diagnosis
        return ended, self.record_end(ended, number)  # it was quicker


def ends_run(diagnosis: Diagnosis) -> bool:
    """Return whether another attempt can't help."""
    return diagnosis.scope in ("permanent", "project") and diagnosis.kind != "lost"


def is_up(job: Job) -> bool:
    """Whether a VM doesn't wait any longer."""
    return not job.is_waiting


def is_created(job: Job) -> bool:
    """Whether a VM exists: it is up, or flex-start has put it into its queue."""
    return is_up(job) or provisioning(job.request) == "flex-start"


def end_error(job: Job, diagnosis: Diagnosis) -> LaunchError:
    """The run's end as an error with its exit code."""
    kinds = (UsageError, JobFailed, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == exit_code(diagnosis)), LaunchError)
    if job.is_workplace:  # nothing ran that could be read or resumed
        return kind(f"{job.run}: {diagnosis.cause}", diagnosis.fix)
    logs = f"launch logs {job.handle}"
    hints = [*([diagnosis.fix] if diagnosis.fix not in ("", logs) else []), f"{logs} has all that it printed"]
    if "--resume" not in diagnosis.fix:
        hints.append(f"launch {'vm' if job.zone else 'vertex'} --resume {job.handle} goes on from there")
    return kind(f"{job.run}: {diagnosis.cause}", "\n".join(hints))
