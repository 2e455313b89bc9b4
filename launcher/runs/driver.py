"""Drive one run: submit attempt after attempt and watch each, until the run ends or this launch stops following it.

Submit a run: find its active job, or create one. A run never has two jobs, whichever process dies at any moment.

Three mechanisms prevent a second job, each covering what the previous one can't:

1. The lock (`attempts/NNNN.json`, create-only). Only the launch that created it sends the one create request: to Vertex
   AI once; to Compute Engine repeatedly for some seconds if no response comes, with a request id that prevents a second
   VM. No launch writes lock NNNN+1 before attempt NNNN is known to have ended. So unless a create request takes effect
   after its lock has expired, there is only one job.
2. The look-up by label, in every region that may have a job of the run. It finds the job of a launch that died, or got
   no response, before it could record the job's name.
3. A job that was created after its lock had expired is found by the next snapshot (the younger job is cancelled), or at
   the latest by its own node, which finds the attempt claimed and exits without touching the run.

The time limits depend on each other. A lock without a job expires when it is 60 s old by the bucket's clock. Its owner
sends the request at most 20 s after it began to write the lock, repeats it (to Compute Engine) for at most 8 s, and
waits 30 s for the response: by then the service has begun to process the request or never will. After a lost response
the job is looked for during 20 s, because it may appear late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from math import ceil
from random import SystemRandom
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from launcher.clock import REAL, Clock, stopwatch
from launcher.diagnosis import Diagnosis, diagnose_end, diagnose_refusal, error_of
from launcher.errors import (
    LaunchError,
    StillRunning,
    UnreachableError,
    UsageError,
)
from launcher.jobs.job import GONE, IDENTITY_LABEL, Job
from launcher.plan.binding import bound, digest
from launcher.plan.build import with_digest
from launcher.plan.model import Attempt, Plan
from launcher.runs.attempts import AttemptEntry, AttemptFacts, next_attempt, place_of, place_text, wait_left
from launcher.runs.endings import (
    LOST,
    cancel_and_confirm,
    diagnosis_of_run,
    no_attempt_left_error,
    release_resources,
    run_ended_error,
    settle,
)
from launcher.runs.identity_check import (
    AllowedChange,
    check_identity,
    comparable_request,
    facts_of,
    request_id,
)
from launcher.runs.ledger import Ledger
from launcher.runs.snapshot import (
    RunObserver,
    RunSnapshot,
    check_duplicate_workstations,
    choose_active_job,
    newest_unrecorded_end,
)
from launcher.runs.stored_plan import is_bound
from launcher.runs.watch import Event, JobView, intervals_of, watch
from launcher.services import request
from launcher.services.base import CreateRefused, GoneError, Service
from launcher.services.request import context_of_job
from launcher.text import rough_duration

FLEX_SLACK_SECONDS = 120.0
"""A flex-start request has its own wait limit. This margin lets Google end the job first, with a reason."""


CURRENT_SECONDS: Final = 20.0
"""Maximum age of a snapshot, and then of a lock, that a launch acts on."""
LOCK_SECONDS: Final = 60.0
"""Age by the bucket's clock at which a lock without a job expires. Before that, its owner may be creating the job."""
LANDING_SECONDS: Final = 20.0
"""Time to search for a job whose create request got no response."""
POLL_SECONDS: Final = 2.0


class AttemptStarted(Struct, frozen=True, kw_only=True):
    """An attempt has a job, the run's active one."""

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


@dataclass(kw_only=True)
class RunDriver:
    """Drive one run through its attempts until it ends: `drive` loops over the attempts, `step` decides."""

    plan: Plan
    """Names its image by digest once it is prepared."""
    service: Service
    ledger: Ledger
    watcher: Watcher
    say: Callable[[str], None]
    ready: Callable[[Plan], Plan]
    """Return the plan with its image pushed to the registry. Called before the first job is created."""
    clock: Clock = REAL
    wall_clock: Callable[[], float] = time.time
    """A clock that does not stop while this machine sleeps."""
    jitter: Callable[[], float] = SystemRandom().random
    allowed: AllowedChange | None = None
    """The change of settings with which the plan may resume its run. None: it must be the same computation."""
    confirm: Callable[[Plan], None] = lambda _plan: None
    """Called before the first job of a new or resumed run is created. Raises LaunchError: it must not be."""
    extra_regions: Iterable[str] | None = None
    """Searched for jobs in addition to the plan's regions if there is no ledger, as far as they can be read; None: all
    regions with Vertex AI training."""

    observe: RunObserver = field(init=False)
    planned: Plan = field(init=False)
    """The plan that each submission begins with: what a preflight check refused may be possible for the next."""
    is_prepared: bool = field(default=False, init=False)
    """The image is known. Determined again for each submission: another launch may have created the run's first job."""
    fresh: bool = field(default=True, init=False)
    """The user asked for the run now, so a new round begins if the last one failed everywhere. Otherwise the current
    round continues."""
    resume: bool = field(default=False, init=False)
    """Run again although the run has ended."""
    round: int = field(default=0, init=False)
    """The round that this submission adds attempts to; 0: not chosen yet."""
    paused_after: int = field(default=0, init=False)
    """The newest attempt after which no (further) pause is due."""
    seen: set[str] = field(default_factory=set, init=False)
    """Ended jobs that were already considered."""
    waited_for: int = field(default=0, init=False)
    """The attempt of another launch that was last reported as waited for."""

    def __post_init__(self) -> None:
        self.planned = self.plan

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
            started = self.submit(fresh=fresh, resume=resume)
            job, number = started.job, started.number
            self.watcher.report(started)
            if detach and job.zone is None:
                return job
            job, diagnosis = self.watch_attempt(job, number, until, stop_when=is_created if detach else never)
            if diagnosis is None or diagnosis.kind == "succeeded":
                return job
            self.watcher.report(AttemptFailed(job=job, number=number, diagnosis=diagnosis))
            if is_final(diagnosis):
                raise end_error(job, diagnosis)
            fresh = resume = False

    def drive_until_running(self, *, fresh: bool) -> tuple[Job, bool]:
        """Return a workstation VM that runs (or exists and is stopped), and whether it was created now. Without an
        existing one, tries zone after zone. Raises as `drive` does."""
        created = False
        while True:
            started = self.submit(fresh=fresh)
            job, number = started.job, started.number
            created, fresh = created or started.created, False
            self.watcher.report(started)
            job, diagnosis = self.watch_attempt(job, number, stop_when=is_up)
            if diagnosis is None:
                return job, created
            self.watcher.report(AttemptFailed(job=job, number=number, diagnosis=diagnosis))
            if is_final(diagnosis):
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
            intervals=intervals_of(self.service.poll_seconds),
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
        diagnosis = diagnose_end(job, context_of_job(job, self.plan.project), self.watcher.error_in_output())
        try:
            return settle(self.ledger, number, job, diagnosis)
        except LaunchError as error:
            unsure = ", or check whether this job was a duplicate" if diagnosis.kind == "succeeded" else ""
            self.say(f"could not record the end of attempt {number}{unsure}: {error.problem}")
            return diagnosis

    def wait_limit(self, job: Job, number: int) -> float | None:
        """Return how many seconds the attempt may wait for machines: its own limit, or what earlier attempts left of
        `limits.wait_total` if that is less. None: no limit."""
        kind = request.read(job.request).provisioning.partition(":")[0]
        same_kind = (
            attempt.wait_seconds for attempt in self.plan.attempts if attempt.provisioning.partition(":")[0] == kind
        )
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
        rounds = {entry.number: entry.round for entry in entries}
        return wait_left(
            self.plan, [entry for entry in entries if entry.number < number and entry.round == rounds.get(number)]
        )

    def cancel_waiting_job(self, job: Job, number: int, wait: float) -> tuple[Job, Diagnosis]:
        """Cancel a job that waited too long. Raises StillRunning: the reason can't be recorded or the end can't be
        confirmed, so no attempt may follow.

        The reason is recorded first, so that no other launch takes this for a cancellation by the user.
        """
        left = self.wait_total_left(number)
        limit = "limits.wait_total" if left is not None and left <= wait else "limits.wait"
        cause = f"{job.state} for {rough_duration(wait)}, longer than {limit} allows"
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

    def submit(self, *, fresh: bool, resume: bool = False) -> AttemptStarted:
        """Return the run's active job; create one, attempt after attempt, if there is none.

        Raises:
            RunEnded, RunSucceeded: the run has already ended, and `resume` is false.
            UsageError: the run id belongs to another computation, or the run folder can't be used.
            NoCapacity: no placement is left in this round. Lists each attempt with its cause and fix.
            NotAuthorised, JobFailed, LaunchError: a refusal that no other placement can avoid.
            UnreachableError: a region can't be read, or it is unknown whether a job was created. The same command finds
                the job later, if there is one.
        """
        self.plan = self.planned
        start_stopwatch = partial(stopwatch, self.clock, self.wall_clock)
        self.observe = RunObserver(self.plan, self.service, self.ledger, start_stopwatch, self.extra_regions)
        self.fresh, self.resume, self.is_prepared = fresh, resume, False
        self.round = self.paused_after = self.waited_for = 0
        self.seen.clear()
        while True:
            if started := self.step(self.observe()):
                return started

    def step(self, snapshot: RunSnapshot) -> AttemptStarted | None:
        """Return the run's job, or take one step towards it and return None."""
        if self.ledger.closed:
            raise UsageError(f"{self.plan.run}: {self.ledger.closed}", f"launch status {self.plan.run}")
        check_identity(self.plan, snapshot, self.ledger, self.allowed)
        if active := [job for job in snapshot.jobs if not job.is_over]:
            return self.take_active(active, snapshot)
        if self.settle_newest(snapshot):
            return None
        self.choose_round(snapshot)
        last = snapshot.last_outcome
        if last and last.end and last.end.ends_run and last.round >= self.round:
            raise run_ended_error(self.plan, last, snapshot)
        return self.submit_next(snapshot)

    def take_active(self, active: Sequence[Job], snapshot: RunSnapshot) -> AttemptStarted | None:
        """Return the active job, whichever launch created it. Of several, keep one and cancel the others."""
        kept = choose_active_job(active, snapshot.entries if self.ledger.locks else (), self.ledger.claimed_by)
        self.cancel_duplicates([job for job in active if job is not kept], kept, snapshot)
        entry = next((entry for entry in reversed(snapshot.entries) if entry.job == kept.name), None)
        newest = snapshot.newest
        is_open = newest is not None and newest.end is None and newest.job is None
        if entry is None and newest and is_open and newest.where == kept.place:
            entry = newest  # it names no job yet
        entry = entry or self.adopt(kept, snapshot)
        if entry is None:
            return None
        if entry.job is None:
            self.ledger.note_job(entry.number, kept.name)
        return AttemptStarted(job=kept, number=entry.number, created=False)

    def cancel_duplicates(self, others: Sequence[Job], kept: Job, snapshot: RunSnapshot) -> None:
        """Cancel duplicate jobs. The reason is recorded first, so that it isn't taken for a cancellation by the user.

        Raises UsageError: see `check_duplicate_workstations`.
        """
        check_duplicate_workstations(kept, others)
        for job in others:
            cause = f"duplicate job of this run; {kept.name} continues"
            if entry := next((one for one in snapshot.entries if one.job == job.name), None):
                diagnosis = Diagnosis(scope="transient", kind="lost", cause=cause)
                self.ledger.note_end(entry.number, diagnosis, job.state)
            self.say(f"cancelling {job.name}: {cause}")
            with suppress(GoneError):
                self.service.cancel(job.name)

    def adopt(self, job: Job, snapshot: RunSnapshot) -> AttemptEntry | None:
        """Lock an attempt for a job without one: it was created late, or without a ledger. None: another launch locked
        that number first."""
        facts = AttemptFacts(
            round=max(snapshot.round, 1),
            region=job.region,
            zone=job.zone,
            provisioning=request.read(job.request).provisioning,
            machine=request.read(job.request).machine_type,
            identity=job.labels.get(IDENTITY_LABEL, ""),
        )
        entry = self.ledger.lock(snapshot.next_number, facts)
        if entry is not None:
            self.ledger.note_job(entry.number, job.name)
        return entry

    def settle_newest(self, snapshot: RunSnapshot) -> bool:
        """Record the end of the newest attempt, or of an ended job without an attempt, or wait for it; return False if
        nothing was to do."""
        newest = snapshot.newest
        if newest is None or not newest.is_open:
            unrecorded = self.unrecorded_job(snapshot)
            if unrecorded is None:
                return False
            entry = self.adopt(unrecorded, snapshot)
            if entry is not None:
                self.record_settled(entry.number, unrecorded)
            return True
        job = snapshot.job_of(newest, self.ledger.locked_at)
        if job is not None:
            if newest.job is None:
                self.ledger.note_job(newest.number, job.name)
            self.record_settled(newest.number, job)
        elif self.ledger.lock_age(newest.number) - snapshot.age() >= LOCK_SECONDS:
            self.ledger.note_end(newest.number, LOST, None)  # it had expired before the snapshot that shows no job
        else:
            self.wait_for(newest, snapshot)
        return True

    def unrecorded_job(self, snapshot: RunSnapshot) -> Job | None:
        """Return an ended job without an attempt, or None. Skips duplicates: their end says nothing about the run."""
        while job := newest_unrecorded_end(snapshot, self.ledger.locked_at, self.seen):
            if diagnosis_of_run(self.ledger, job, self.diagnose(job)).kind != "lost":
                break
            self.seen.add(job.name)
        self.seen.update(job.name for job in snapshot.jobs if job.is_over)
        return job

    def record_settled(self, number: int, job: Job) -> None:
        """Record how a job ended, and remove its resources: nothing of it may run beside the next job."""
        settle(self.ledger, number, job, self.diagnose(job))
        release_resources(self.service, job, self.say)

    def diagnose(self, job: Job) -> Diagnosis:
        """Return the diagnosis of a job's end without its output."""
        return diagnose_end(job, request.context_of_job(job, self.plan.project))

    def wait_for(self, entry: AttemptEntry, snapshot: RunSnapshot) -> None:
        """Wait while another launch is creating the job of an attempt, in the same round."""
        self.round = self.round or max(snapshot.round, 1)
        if self.waited_for != entry.number:
            self.say(f"another launch is submitting attempt {entry.number} of this run; waiting for its job")
            self.waited_for = entry.number
        self.clock.sleep(POLL_SECONDS)

    def choose_round(self, snapshot: RunSnapshot) -> None:
        """Choose the round of this submission from its first snapshot. Raises RunEnded."""
        if self.round:
            return
        newest, last, tries = snapshot.newest, snapshot.last_outcome, snapshot.tries(snapshot.round)
        if newest is None:
            self.round = 1
        elif self.resume:
            self.round = snapshot.round + 1
        elif last and last.end and last.end.ends_run:
            raise run_ended_error(self.plan, last, snapshot)
        else:
            nothing_left = next_attempt(self.plan, tries).attempt is None
            self.round = snapshot.round + 1 if self.fresh and nothing_left else snapshot.round
        if self.fresh and newest:
            self.paused_after = newest.number  # no backoff after the attempts of an earlier command

    def submit_next(self, snapshot: RunSnapshot) -> AttemptStarted | None:
        """Submit the next attempt; None: a new snapshot is needed. Raises LaunchError: no attempt is left."""
        tries = snapshot.tries(self.round)
        attempt, pause = next_attempt(self.plan, tries, self.jitter())
        if attempt is None:
            raise no_attempt_left_error(self.plan, tries)
        if pause and self.paused_after < tries[-1].number:
            self.paused_after = tries[-1].number
            self.say(f"retrying in {pause:.0f} s")
            self.clock.sleep(pause)
            return None
        age, locked = snapshot.age(), self.ledger.locks
        if age > CURRENT_SECONDS:
            self.say(f"listing the run's jobs took {age:.0f} s, so the result may be outdated; listing them again")
            return None
        if not self.is_prepared:
            self.prepare(snapshot)
            attempt = next_attempt(self.plan, tries).attempt  # the preflight checks may have removed placements
            if attempt is None:
                raise no_attempt_left_error(self.plan, tries)
        if snapshot.age() > CURRENT_SECONDS or locked != self.ledger.locks:
            return None
        return self.create_job(attempt, snapshot)

    def prepare(self, snapshot: RunSnapshot) -> None:
        """Determine the image. A run that has had a job keeps its image: a resumed run must be the same code."""
        if snapshot.entries:
            self.ledger.stored()  # raises NewerFormat before anything is created
        first = self.first_request(snapshot)
        if self.resume or not first:
            self.confirm(self.plan)
        if first:
            self.plan = bound(with_digest(self.plan, request.read(first).image))
        else:
            self.plan = bound(self.ready(self.plan))
        self.is_prepared = True

    def first_request(self, snapshot: RunSnapshot) -> Mapping[str, Any] | None:
        """Return the request of the run's first job; None: unknown, not trustworthy, or its image has no digest.

        A CustomJob's request can't be changed. A VM's can, so its request is that of the stored plan, if that was
        verified. Either must differ from the plan in its image alone: whoever may create jobs could copy the labels,
        but not act as the plan's account.
        """
        requests = (job.request for job in reversed(snapshot.jobs) if not job.zone)
        if first := next(filter(self.differs_in_image_alone, requests), None):
            return first
        stored = self.ledger.stored() if any(entry.job for entry in snapshot.entries) else None
        if not stored or not stored.plan.attempts:
            return None
        first = stored.plan.attempts[0].request
        is_trusted = is_bound(stored, snapshot.jobs, snapshot.entries, self.service)
        return first if is_trusted and self.differs_in_image_alone(first) else None

    def differs_in_image_alone(self, body: Mapping[str, Any]) -> bool:
        """Return whether a request names its image by digest and differs from the plan's request in nothing else but
        the allowed change. For another kind of GPU the image may need another build of PyTorch."""
        known, own = self.allowed.lines if self.allowed else (), comparable_request(self.plan, body)
        changed = request.differences(body, own, request.submitted)
        return (
            "@sha256:" in request.read(body).image
            and request.gpu(body) == request.gpu(own)
            and all(line.startswith("image: ") or line in known for line in changed)
        )

    def create_job(self, attempt: Attempt, snapshot: RunSnapshot) -> AttemptStarted | None:
        """Write one lock and send one create request. `attempt` may be from before the image was known: only its
        placement is used.

        Raises JobFailed: the run's hours are used up.
        """
        attempt = next(planned for planned in self.plan.attempts if place_of(planned) == place_of(attempt))
        body = request.within_hours(attempt.request, snapshot.used_seconds(attempt.shutdown_seconds), self.plan.run)
        if attempt.ends:
            body = request.until(body, datetime.fromisoformat(attempt.ends).timestamp() - self.wall_clock())
        body = request.within_wait(body, wait_left(self.plan, snapshot.tries(self.round)))
        elapsed, locked = stopwatch(self.clock, self.wall_clock), self.ledger.locks
        entry = self.ledger.lock(snapshot.next_number, facts_of(attempt, self.round))
        if entry is None:
            return None
        self.ledger.write_plan(self.plan)  # only the lock's owner writes it, so it is always the newest job's plan
        if self.resume and not any(one.job for one in snapshot.tries(self.round)):
            self.ledger.allow_restart()
        if self.plan.run_folder and (not self.ledger.locks or snapshot.unrecorded_jobs()):
            body = request.beside_ended(body, [job.id for job in snapshot.jobs if job.is_over])
        # The lock may expire before a late request takes effect; a ledger that lost its locks needs a new snapshot.
        if elapsed() > CURRENT_SECONDS or locked != self.ledger.locks:
            self.ledger.note_end(entry.number, LOST, None)
            return None
        try:
            writer = "" if self.ledger.locks else entry.writer
            create_id = request_id(self.plan.run, entry.where, entry.number, digest(self.plan), writer)
            job = self.service.create(attempt, body, create_id)
        except CreateRefused as error:
            self.record_refusal(entry, attempt, error)
            return None
        except UnreachableError as error:
            return self.find_created_job(entry, snapshot, error)
        except LaunchError:  # the request was not sent
            self.ledger.note_end(entry.number, LOST, None)
            raise
        return self.record_job(entry, job, snapshot)

    def record_refusal(self, entry: AttemptEntry, attempt: Attempt, error: CreateRefused) -> None:
        """Record and report why no job was created."""
        diagnosis = diagnose_refusal(
            error.refusal, request.request_context(self.plan.project, attempt.region, attempt.request, attempt.zone)
        )
        end = self.ledger.note_end(entry.number, diagnosis, None)
        place = place_text(entry.region, entry.zone, entry.provisioning)
        self.say(f"attempt {entry.number} ({place}) was refused: {end.cause}")

    def find_created_job(
        self, entry: AttemptEntry, snapshot: RunSnapshot, error: UnreachableError
    ) -> AttemptStarted | None:
        """Look for the job of a create request without a response; None: there is none, and that was recorded.

        Raises UnreachableError: the jobs can't be listed. The attempt stays open for the next launch.
        """
        self.say(f"{error.problem}; checking whether the job was created")
        until = self.clock.now() + LANDING_SECONDS
        while True:
            begun = self.clock.now()
            try:
                jobs = self.observe.jobs(snapshot.entries)
            except UnreachableError as trouble:
                if begun >= until:
                    hint = "Repeat the command: it finds the job, or continues without it after a minute."
                    raise UnreachableError(
                        f"unknown whether attempt {entry.number} created a job: {trouble.problem}", hint
                    ) from error
                jobs = None
            created = [job for job in jobs or () if job.place == entry.where and snapshot.is_new(job)]
            if created:
                return self.record_job(entry, created[0], snapshot) if len(created) == 1 else None
            if jobs is not None and begun >= until:
                self.ledger.note_end(entry.number, LOST, None)
                return None
            self.clock.sleep(POLL_SECONDS)

    def record_job(self, entry: AttemptEntry, job: Job, snapshot: RunSnapshot) -> AttemptStarted:
        """Record a created job and return it. If that fails, the job still belongs to the run by its label.

        Without locks, or after an attempt that was recorded as lost, another job may exist by now; then the same one
        is kept as in any other launch.
        """
        started = AttemptStarted(job=job, number=entry.number, created=True)
        try:
            self.ledger.note_job(entry.number, job.name)
            if self.ledger.locks and not any(one.end and one.end.kind == "lost" for one in snapshot.tries(self.round)):
                return started
            others = [one for one in self.observe.jobs(snapshot.entries) if one.name != job.name and not one.is_over]
            if not others:
                return started
            kept = self.take_active([job, *others], self.observe()) or started
            return replace(kept, created=kept.job.name == job.name)
        except LaunchError as error:
            self.say(f"{job.name} was created, but recording it failed: {error.problem}")
            return started


def is_final(diagnosis: Diagnosis) -> bool:
    """Return whether another attempt can't help."""
    return diagnosis.scope in ("permanent", "project") and diagnosis.kind != "lost"


def is_up(job: Job) -> bool:
    """Return whether a VM no longer waits for a machine."""
    return not job.is_waiting


def is_created(job: Job) -> bool:
    """Return whether a VM exists: it is up, or queued by flex-start."""
    return is_up(job) or request.read(job.request).provisioning == "flex-start"


def end_error(job: Job, diagnosis: Diagnosis) -> LaunchError:
    """Return the error, with its exit code, for a run that ended without success."""
    kind = error_of(diagnosis)
    if job.is_workplace:  # it has no logs and no checkpoint
        return kind(f"{job.run}: {diagnosis.cause}", diagnosis.fix)
    logs = f"launch logs {job.handle}"
    hints = [*([diagnosis.fix] if diagnosis.fix not in ("", logs) else []), f"{logs} shows all of its output"]
    if "--resume" not in diagnosis.fix:
        start = job.command if job.target == "on" else f"launch {job.target}"
        hints.append(f"{start} --resume {job.handle} resumes from there")
    return kind(f"{job.run}: {diagnosis.cause}", "\n".join(hints))
