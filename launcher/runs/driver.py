"""A run from its plan to its end: one attempt after the other, each watched, as long as this launch follows."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Protocol

from msgspec import Struct

from launcher.backend.base import Service
from launcher.backend.request import provisioning, tried_by
from launcher.clock import REAL, Clock
from launcher.diagnosis import Verdict, exit_code, of_end
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, StillRunning, UsageError
from launcher.jobs.job import GONE, Job
from launcher.plan.model import Plan
from launcher.runs.attempts import wait_left
from launcher.runs.endings import released
from launcher.runs.ledger_base import Book
from launcher.runs.submit import Submitted, cancel_and_confirm, settle, submit
from launcher.runs.watch.loop import Event, Eyes, watch

FLEX_SLACK_SECONDS = 120.0
"""For flex-start the request says itself how long it may wait: Google's own end comes first, and says why."""


class Took(Struct, frozen=True, kw_only=True):
    """An attempt is under way."""

    job: Job
    number: int
    made: bool
    """Whether this launch made it; else it was found."""


class Gave(Struct, frozen=True, kw_only=True):
    """An attempt has ended, and not well."""

    job: Job
    number: int
    verdict: Verdict


class Watcher(Protocol):
    """Who looks at jobs, and who is told."""

    def eyes(self, job: Job, number: int) -> Eyes:
        """What to look at a job with."""

    def tell(self, event: Event | Took | Gave) -> None:
        """Something has happened."""

    def said(self) -> str:
        """The error that the job's output has named, if it has."""


class Course(Struct, frozen=True, kw_only=True):
    """What stays the same through all attempts of a run."""

    plan: Plan
    service: Service
    book: Book
    watcher: Watcher
    say: Callable[[str], None]
    ready: Callable[[Plan], Plan]
    """The plan with its image in the registry, once something is to be created."""
    clock: Clock = REAL


def start(course: Course, *, fresh: bool, resume: bool = False) -> Submitted:
    """The run's active job, made if there is none. Raises LaunchError: see `submit`."""
    return submit(
        course.plan,
        course.service,
        course.book,
        course.clock,
        course.say,
        fresh=fresh,
        resume=resume,
        ready=course.ready,
    )


def drive(
    course: Course, *, fresh: bool, resume: bool = False, detach: bool = False, watch_seconds: float | None = None
) -> Job:
    """Attempt after attempt until the run has ended well; with `detach`, only until a job is there.

    Raises:
        RunEnded: there was nothing to do.
        JobFailed, NoCapacity, NotAuthorised, LaunchError: how it ended instead; each says what to do.
        StillRunning: `watch_seconds` are over. The job goes on.
    """
    until = course.clock.now() + watch_seconds if watch_seconds is not None else None
    while True:
        got = start(course, fresh=fresh, resume=resume)
        course.watcher.tell(Took(job=got.job, number=got.number, made=got.made))
        if detach and got.job.zone is None:
            return got.job
        job, verdict = attend(course, got.job, got.number, until, enough=is_there if detach else never)
        if verdict is None:
            return job
        if verdict.kind == "succeeded":
            return job
        course.watcher.tell(Gave(job=job, number=got.number, verdict=verdict))
        if ends_run(verdict):
            raise failure(job, verdict)
        fresh = resume = False


def until_there(course: Course, *, fresh: bool) -> tuple[Job, bool]:
    """A VM to work on that runs (or is there, and was stopped), made zone after zone if there is none; and whether it
    was made. Raises as `drive` does."""
    made = False
    while True:
        got = start(course, fresh=fresh)
        made, fresh = made or got.made, False
        course.watcher.tell(Took(job=got.job, number=got.number, made=got.made))
        job, verdict = attend(course, got.job, got.number, enough=is_up)
        if verdict is None:
            return job, made
        course.watcher.tell(Gave(job=job, number=got.number, verdict=verdict))
        if ends_run(verdict):
            raise failure(job, verdict)


def ends_run(verdict: Verdict) -> bool:
    """Return whether another attempt can't help."""
    return verdict.scope in ("permanent", "project") and verdict.kind != "lost"


def never(_job: Job) -> bool:
    """Only the end is enough."""
    return False


def is_up(job: Job) -> bool:
    """Whether a VM doesn't wait any longer."""
    return not job.is_waiting


def is_there(job: Job) -> bool:
    """Whether a VM exists: it is up, or flex-start has put it into its queue."""
    return is_up(job) or provisioning(job.request) == "flex-start"


def attend(
    course: Course, job: Job, number: int, until: float | None = None, enough: Callable[[Job], bool] = never
) -> tuple[Job, Verdict | None]:
    """Watch one attempt to its end, and what that means, as it is noted; None: it goes on, and is `enough`. Raises as
    `watch` does."""
    wait = waiting(course, job, number)
    left = until - course.clock.now() if until is not None else None
    waited = since(course, job) if wait is not None else 0.0
    eyes = course.watcher.eyes(job, number)
    watched = watch(
        eyes, course.watcher.tell, course.clock, wait_seconds=wait, waited=waited, watch_seconds=left, enough=enough
    )
    if watched.why == "there":
        return watched.job, None
    if watched.why == "waited":
        return give_up(course, watched.job, number, wait or 0.0)
    verdict = noted(course, watched.job, number)
    released(course.service, watched.job, course.say)
    return watched.job, verdict


def since(course: Course, job: Job) -> float:
    """Seconds since a job's creation; 0 where the bucket does not say: the job is watched all the same."""
    try:
        return course.book.since(job.created)
    except LaunchError:
        return 0.0


def noted(course: Course, job: Job, number: int) -> Verdict:
    """What a job's end means. A duplicate that succeeded has done nothing: the next look finds the job that works.

    An end that can't be noted is one all the same: whoever looks next finds it in the job.
    """
    verdict = of_end(job, tried_by(job, course.plan.project), course.watcher.said())
    try:
        return settle(course.book, number, job, verdict).verdict
    except LaunchError as error:
        unsure = "; nor whether it was this job that did the work" if verdict.kind == "succeeded" else ""
        course.say(f"how attempt {number} ended can't be noted{unsure}: {error.problem}")
        return verdict


def waiting(course: Course, job: Job, number: int) -> float | None:
    """Seconds that the attempt may wait for machines: its own limit, or what the run's attempts before it have left of
    `limits.wait_total`. None: no limit."""
    kind = provisioning(job.request).partition(":")[0]
    alike = (one.wait_seconds for one in course.plan.attempts if one.provisioning.partition(":")[0] == kind)
    own, left = next(alike, course.plan.limits.wait_seconds), total_left(course, number)
    limits = [limit for limit in (own, left) if limit is not None]
    if not limits:
        return None
    return min(limits) + (FLEX_SLACK_SECONDS if kind == "flex-start" else 0.0)


def total_left(course: Course, number: int) -> float | None:
    """Seconds of `limits.wait_total` that the attempts of the round before this one have left; the whole where they
    can't be read; None: there is no such limit."""
    try:
        entries = course.book.entries() if course.plan.limits.wait_total_seconds else ()
    except LaunchError:
        entries = ()
    rounds = {one.number: one.round for one in entries}
    return wait_left(course.plan, [one for one in entries if one.number < number and one.round == rounds.get(number)])


def give_up(course: Course, job: Job, number: int, wait: float) -> tuple[Job, Verdict]:
    """Cancel a job that has waited too long. Raises StillRunning: that can't be noted, or not be confirmed, so nothing
    may follow it.

    The verdict is noted first: whoever finds the job cancelled must not take it for the user's wish.
    """
    left = total_left(course, number)
    limit = "limits.wait_total" if left is not None and left <= wait else "limits.wait"
    cause = f"{job.state} for {minutes(wait)}, longer than {limit} allows"
    fix = f"A longer wait: --set {limit}={2 * ceil(wait / 3600)}h"
    verdict = Verdict(scope="region+provisioning", kind="waited", cause=cause, fix=fix)
    try:
        settle(course.book, number, job, verdict, wait)
    except LaunchError as error:
        problem = f"{job.name} is {cause}, and goes on waiting: why it ends can't be noted: {error.problem}"
        raise StillRunning(problem, f"launch follow {job.run} tries again; launch cancel {job.run} ends it") from error
    course.say(f"{cause}: cancelling it")
    ended = cancel_and_confirm(course.service, job, course.clock, course.say)
    if ended.state in ("CANCELLED", GONE):
        released(course.service, ended, course.say)
        return ended, verdict
    return ended, noted(course, ended, number)  # it was quicker


def minutes(seconds: float) -> str:
    """`6 h`, `90 min` or `45 s`."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds / 60:.3g} min" if seconds >= 120 else f"{seconds:.0f} s"


def failure(job: Job, verdict: Verdict) -> LaunchError:
    """The run's end as an error with its exit code."""
    kinds = (UsageError, JobFailed, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == exit_code(verdict)), LaunchError)
    if job.is_workplace:  # nothing ran that could be read or resumed
        return kind(f"{job.run}: {verdict.cause}", verdict.fix)
    logs = f"launch logs {job.handle}"
    hints = [*([verdict.fix] if verdict.fix not in ("", logs) else []), f"{logs} has all that it printed"]
    if "--resume" not in verdict.fix:
        hints.append(f"launch {'vm' if job.zone else 'vertex'} --resume {job.handle} goes on from there")
    return kind(f"{job.run}: {verdict.cause}", "\n".join(hints))
