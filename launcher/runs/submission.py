"""One job for one run, whatever dies when: the way from a plan to the run's active job.

Three things keep a run from having two jobs, each where the one before can't:

1. The lock (`attempts/NNNN.json`, create-only). Who has created it, and nobody else, sends one create request: to
   Vertex AI once; to Compute Engine again for some seconds where no answer comes, with the id by which it makes nothing
   twice. Nobody writes NNNN+1 before NNNN is known to have ended. So as long as a lock's create can't land after the
   lock was given up, there is never a second job.
2. The look-up by label, in every region that a job of the run may be in. It finds what a launch has made that died, or
   lost its answer, before it could note the job's name.
3. What lands all the same after its lock was given up is found at the next look (the younger job is cancelled), and at
   the latest by its own node, which finds the attempt claimed and ends without having touched the run.

The times belong together. A lock is given up when it is 60 s old by the bucket's clock and has no job. Its owner sends
first no later than 20 s after it began to write it, last (to Compute Engine) no more than 8 s after that, and waits
30 s for the answer: whatever the request does, it has begun to do it by then. An answer that was lost is looked for
20 s long, as a request may be slow to have its effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from launcher.backend import request
from launcher.backend.base import CreateRefused, GoneError, Service
from launcher.clock import Clock, stopwatch
from launcher.diagnosis import Diagnosis, of_end, of_refusal
from launcher.errors import LaunchError
from launcher.gcp.api import UnreachableError
from launcher.jobs.job import Job
from launcher.plan.binding import bound, digest
from launcher.plan.build import with_digest
from launcher.plan.model import Attempt, Plan
from launcher.runs.attempts import Entry, next_attempt, place_of, place_text, wait_left
from launcher.runs.endings import (
    LOST,
    diagnosis_of_run,
    no_attempt_left_error,
    release_resources,
    run_ended_error,
    settle,
)
from launcher.runs.identity import check_identity, facts_of, facts_of_job, request_id
from launcher.runs.ledger import Ledger
from launcher.runs.snapshot import RunObserver, RunSnapshot, check_workplaces, choose, entry_of, orphan
from launcher.runs.stored_plan import is_bound

CURRENT_SECONDS: Final = 20.0
"""For so long a look, and then a lock, may be acted upon."""
YOUNG_SECONDS: Final = 60.0
"""Until then a lock without a job is somebody's who is creating one; by the bucket's clock."""
LANDING_SECONDS: Final = 20.0
"""How long a job is looked for that an answer should have told of."""
POLL_SECONDS: Final = 2.0
CHANCE: Final = SystemRandom().random


class Submitted(NamedTuple):
    """The run's active job, and the number of its attempt. `made`: this launch made it; else it was found."""

    job: Job
    number: int
    made: bool


def submit(
    plan: Plan,
    service: Service,
    ledger: Ledger,
    clock: Clock,
    say: Callable[[str], None],
    *,
    fresh: bool,
    resume: bool = False,
    ready: Callable[[Plan], Plan],
    also: Iterable[str] | None = None,
    wall: Callable[[], float] = time.time,
    chance: Callable[[], float] = CHANCE,
) -> Submitted:
    """The run's active job; made, attempt after attempt, if there is none.

    `fresh`: a person has asked for the run now, so a round of attempts that had come to nothing before is begun anew;
    else the attempts are taken up where they were left. `resume`: a run that has ended goes on. `ready` puts the
    plan's image into the registry, before the first create of a run that has had no job. `also` are regions to look in
    beside the plan's where there is no ledger, as far as they can be read; None: wherever Vertex AI trains. `wall` is
    a clock that goes on while this machine sleeps.

    Raises:
        RunEnded: it has ended, and nobody asked to resume it. RunSucceeded: well.
        UsageError: the run id belongs to something else; or the run folder can't be used.
        NoCapacity: no place of the plan is left in this round; every attempt is told with its cause and fix.
        NotAuthorised, JobFailed, LaunchError: a refusal that no other place can change.
        UnreachableError: a region can't be read, or whether there is a job isn't known. Nothing was created, or it is
            found by the same command once it can be.
    """
    watch = partial(stopwatch, clock, wall)
    observe = RunObserver(plan, service, ledger, watch, also)
    submission = Submission(
        plan=plan,
        service=service,
        ledger=ledger,
        clock=clock,
        say=say,
        observe=observe,
        make_ready=ready,
        stopwatch=watch,
        chance=chance,
        fresh=fresh,
        resume=resume,
    )
    while True:
        if got := submission.step(observe()):
            return got


@dataclass(kw_only=True)
class Submission:
    """One command's way to a job: step by step, each upon a new look."""

    plan: Plan
    """With its image by digest from the first create on."""
    service: Service
    ledger: Ledger
    clock: Clock
    say: Callable[[str], None]
    observe: RunObserver
    make_ready: Callable[[Plan], Plan]
    stopwatch: Callable[[], Callable[[], float]]
    chance: Callable[[], float]
    fresh: bool
    resume: bool
    round: int = 0
    """Of this command; 0: not known yet."""
    is_ready: bool = False
    paused_after: int = 0
    """The number of the attempt whose pause is over."""
    seen: set[str] = field(default_factory=set)
    """Jobs that had ended when this command looked: what they mean is known."""
    waited_for: int = 0
    """The number of somebody's attempt of which was said that it is waited for."""

    def step(self, snapshot: RunSnapshot) -> Submitted | None:
        """The job, or one step towards it; None: look again."""
        check_identity(self.plan, snapshot, self.ledger)
        if active := [job for job in snapshot.jobs if not job.is_over]:
            return self.take_active(active, snapshot)
        if self.settle_newest(snapshot):
            return None
        self.choose_round(snapshot)
        last = snapshot.decided
        if last and last.end and last.end.ends_run and last.round >= self.round:
            raise run_ended_error(self.plan, last, snapshot)
        return self.next_attempt(snapshot)

    def take_active(self, active: Sequence[Job], snapshot: RunSnapshot) -> Submitted | None:
        """The active job is the run's, whoever made it. Of several one stays: the same one for whoever looks."""
        kept = choose(active, snapshot.entries if self.ledger.locks else (), self.ledger.holder)
        self.cancel_duplicates([job for job in active if job is not kept], kept, snapshot)
        entry = entry_of(kept, snapshot.entries) or self.adopt(kept, snapshot)
        if entry is None:
            return None
        if entry.job is None:
            self.ledger.note_job(entry.number, kept.name)
        return Submitted(kept, entry.number, made=False)

    def cancel_duplicates(self, others: Sequence[Job], kept: Job, snapshot: RunSnapshot) -> None:
        """Cancel what a run has too many. The end is noted first: it is no wish of a person that the run ends.

        Raises UsageError: they are VMs to work on.
        """
        check_workplaces(kept, others)
        for job in others:
            cause = f"a second job of this run; {kept.name} goes on"
            if entry := next((one for one in snapshot.entries if one.job == job.name), None):
                diagnosis = Diagnosis(scope="transient", kind="lost", cause=cause)
                self.ledger.note_end(entry.number, diagnosis, job.state)
            self.say(f"cancelling {job.name}: {cause}")
            with suppress(GoneError):
                self.service.cancel(job.name)

    def adopt(self, job: Job, snapshot: RunSnapshot) -> Entry | None:
        """An attempt for a job that none is known of: it landed late, or somebody made it without a ledger. None:
        somebody else was quicker to write that number."""
        facts = facts_of_job(job, snapshot.next_number, max(snapshot.round, 1))
        entry = self.ledger.lock(facts)
        if entry is not None:
            self.ledger.note_job(entry.number, job.name)
        return entry

    def settle_newest(self, snapshot: RunSnapshot) -> bool:
        """Whether something had to be noted or waited for first: how the newest attempt ended, or that of a job that
        no attempt is known of."""
        newest = snapshot.newest
        if newest is None or not newest.is_open:
            stray = self.unrecorded_job(snapshot)
            if stray is None:
                return False
            entry = self.adopt(stray, snapshot)
            if entry is not None:
                self.settle(entry.number, stray)
            return True
        job = snapshot.job_of(newest, self.ledger.written)
        if job is not None:
            if newest.job is None:
                self.ledger.note_job(newest.number, job.name)
            self.settle(newest.number, job)
        elif self.ledger.age(newest.number) - snapshot.age() >= YOUNG_SECONDS:
            self.ledger.note_end(newest.number, LOST, None)  # it was as old when the look began that found no job
        else:
            self.wait_for(newest, snapshot)
        return True

    def unrecorded_job(self, snapshot: RunSnapshot) -> Job | None:
        """An ended job that no attempt is known of, and that has worked: a duplicate's end says nothing of the run."""
        while job := orphan(snapshot, self.ledger.written, self.seen):
            if diagnosis_of_run(self.ledger, job, self.diagnose(job)).kind != "lost":
                break
            self.seen.add(job.name)
        self.seen.update(job.name for job in snapshot.jobs if job.is_over)
        return job

    def settle(self, number: int, job: Job) -> None:
        """Note how a job ended, and remove what it has left: nothing of it may run on beside the next one."""
        settle(self.ledger, number, job, self.diagnose(job))
        release_resources(self.service, job, self.say)

    def diagnose(self, job: Job) -> Diagnosis:
        """What a job's end says by itself."""
        return of_end(job, request.tried_by(job, self.plan.project))

    def wait_for(self, entry: Entry, snapshot: RunSnapshot) -> None:
        """Somebody is creating a job. What comes of it is news: this command began before it."""
        self.round = self.round or max(snapshot.round, 1)
        if self.waited_for != entry.number:
            self.say(f"another launch of this run is making attempt {entry.number}: waiting for its job")
            self.waited_for = entry.number
        self.clock.sleep(POLL_SECONDS)

    def choose_round(self, snapshot: RunSnapshot) -> None:
        """The round of this command, from what was there when it began. Raises RunEnded."""
        if self.round:
            return
        newest, last, tries = snapshot.newest, snapshot.decided, snapshot.tries(snapshot.round)
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
            self.paused_after = newest.number  # what somebody was told long ago asks for no pause now

    def next_attempt(self, snapshot: RunSnapshot) -> Submitted | None:
        """The next attempt. Raises NoCapacity and its like: none is left."""
        tries = snapshot.tries(self.round)
        attempt, pause = next_attempt(self.plan, tries, self.chance())
        if attempt is None:
            raise no_attempt_left_error(self.plan, tries)
        if pause and self.paused_after < tries[-1].number:
            self.paused_after = tries[-1].number
            self.say(f"again in {pause:.0f} s")
            self.clock.sleep(pause)
            return None
        age, locked = snapshot.age(), self.ledger.locks
        if age > CURRENT_SECONDS:
            self.say(f"to look for jobs of this run took {age:.0f} s, too long to act upon: looking again")
            return None
        if not self.is_ready:
            self.prepare(snapshot)
            attempt = next_attempt(self.plan, tries).attempt  # places that can't work may be no more in it
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
        self.plan = bound(in_image_of(self.plan, first) if first else self.make_ready(self.plan))
        self.is_ready = True

    def first_request(self, snapshot: RunSnapshot) -> Mapping[str, Any] | None:
        """Return the request of the run's first job; None: unknown, not trustworthy, or its image has no digest.

        A CustomJob's request can't be changed. A VM's can, so its request is that of the stored plan, if that was
        verified. Either must differ from the plan in its image alone: whoever may create jobs could copy the labels,
        but not act as the plan's account.
        """
        requests = (job.request for job in reversed(snapshot.jobs) if not job.zone)
        if found := next(filter(self.differs_in_image_alone, requests), None):
            return found
        stored = self.ledger.stored() if any(entry.job for entry in snapshot.entries) else None
        if not stored or not stored.plan.attempts:
            return None
        found = stored.plan.attempts[0].request
        is_trusted = is_bound(stored, snapshot.jobs, snapshot.entries, self.service)
        return found if is_trusted and self.differs_in_image_alone(found) else None

    def differs_in_image_alone(self, body: Mapping[str, Any]) -> bool:
        """Return whether a request names its image by digest and differs from the plan's request in nothing else."""
        changed = request.differences(body, self.plan.attempts[0].request, request.submitted)
        return "@sha256:" in request.image(body) and all(line.startswith("image: ") for line in changed)

    def create_job(self, attempt: Attempt, snapshot: RunSnapshot) -> Submitted | None:
        """Lock and create, once each. `attempt` is from before the image was known; its place is what counts.

        Raises JobFailed: the run's hours are used up.
        """
        attempt = next(one for one in self.plan.attempts if place_of(one) == place_of(attempt))
        body = request.within_hours(attempt.request, snapshot.used_seconds(attempt.shutdown_seconds), self.plan.run)
        body = request.within_wait(body, wait_left(self.plan, snapshot.tries(self.round)))
        elapsed, locked = self.stopwatch(), self.ledger.locks
        entry = self.ledger.lock(facts_of(attempt, snapshot.next_number, self.round))
        if entry is None:
            return None
        self.ledger.write_plan(self.plan)  # only with the lock, so that it is always the newest job's plan
        if self.resume and not any(one.job for one in snapshot.tries(self.round)):
            self.ledger.forgive()
        if self.plan.run_folder and (not self.ledger.locks or snapshot.unnamed()):
            body = request.beside_ended(body, [job.id for job in snapshot.jobs if job.is_over])
        # Others may take the lock for given up before the request has landed; without locks more is to be looked at.
        if elapsed() > CURRENT_SECONDS or locked != self.ledger.locks:
            self.ledger.note_end(entry.number, LOST, None)
            return None
        try:
            job = self.service.create(attempt, body, self.request_id(entry))
        except CreateRefused as error:
            self.record_refusal(entry, attempt, error)
            return None
        except UnreachableError as error:
            return self.find_created_job(entry, snapshot, error)
        except LaunchError:  # nothing was sent
            self.ledger.note_end(entry.number, LOST, None)
            raise
        return self.record_job(entry, job, snapshot)

    def request_id(self, entry: Entry) -> str:
        """Return the create request's id."""
        writer = "" if self.ledger.locks else entry.writer
        return request_id(self.plan.run, entry.where, entry.number, digest(self.plan), writer)

    def record_refusal(self, entry: Entry, attempt: Attempt, error: CreateRefused) -> None:
        """No job was made: note why, and say it."""
        diagnosis = of_refusal(
            error.refusal, request.tried(self.plan.project, attempt.region, attempt.request, attempt.zone)
        )
        end = self.ledger.note_end(entry.number, diagnosis, None)
        self.say(f"attempt {entry.number} ({place_text(*entry.place)}) was refused: {end.cause}")

    def find_created_job(self, entry: Entry, snapshot: RunSnapshot, error: UnreachableError) -> Submitted | None:
        """What became of a create without an answer: its job, or None after noting that there is none.

        Raises UnreachableError: that can't be seen. The lock stays open for whoever looks next.
        """
        self.say(f"{error.problem}; looking whether the job is there")
        until = self.clock.now() + LANDING_SECONDS
        while True:
            begun = self.clock.now()
            try:
                jobs = self.observe.jobs(snapshot.entries)
            except UnreachableError as trouble:
                if begun >= until:
                    again = "Type the same command again: it finds the job, or goes on without it after a minute."
                    raise UnreachableError(
                        f"whether attempt {entry.number} has made a job isn't known: {trouble.problem}", again
                    ) from error
                jobs = None
            found = [job for job in jobs or () if job.place == entry.where and snapshot.is_new(job)]
            if found:
                return self.record_job(entry, found[0], snapshot) if len(found) == 1 else None
            if jobs is not None and begun >= until:
                self.ledger.note_end(entry.number, LOST, None)
                return None
            self.clock.sleep(POLL_SECONDS)

    def record_job(self, entry: Entry, job: Job, snapshot: RunSnapshot) -> Submitted:
        """The job that was made. That it can't be noted is no reason to lose it: its label says whose it is.

        Without locks, or after a create that nothing came of (as far as could be seen), another may be there by now:
        the oldest stays, as for everybody else who looks.
        """
        submitted = Submitted(job, entry.number, made=True)
        try:
            self.ledger.note_job(entry.number, job.name)
            if self.ledger.locks and not any(one.end and one.end.kind == "lost" for one in snapshot.tries(self.round)):
                return submitted
            others = [one for one in self.observe.jobs(snapshot.entries) if one.name != job.name and not one.is_over]
            if not others:
                return submitted
            kept = self.take_active([job, *others], self.observe()) or submitted
            return kept._replace(made=kept.job.name == job.name)
        except LaunchError as error:
            self.say(f"{job.name} is made, but: {error.problem}")
            return submitted


def in_image_of(plan: Plan, first: Mapping[str, Any]) -> Plan:
    """Return the plan with the image of the request `first`, and the name that the image gives our package."""
    plan = with_digest(plan, request.image(first))
    attempts = (replace(one, request=request.for_image_of(one.request, first)) for one in plan.attempts)
    return replace(plan, attempts=tuple(attempts))
