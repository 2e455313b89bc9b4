"""End attempts and runs: record the end, remove what a job leaves, build the final error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Final

from msgspec.structs import replace

from launcher.clock import Clock
from launcher.diagnosis import Diagnosis, error_of
from launcher.errors import (
    LaunchError,
    NoCapacity,
    StillRunning,
    UnreachableError,
)
from launcher.jobs.job import GONE, Job, command
from launcher.plan.model import Plan
from launcher.runs.attempts import (
    RUN_ENDS,
    AttemptEnd,
    AttemptEntry,
    AttemptFacts,
    attempts_summary,
    is_wait_used_up,
)
from launcher.runs.ledger import Ledger
from launcher.runs.snapshot import RunSnapshot, job_from_entry, with_request
from launcher.services.base import GoneError, Jobs
from launcher.text import exact_duration

POLL_SECONDS: Final = 2.0
CANCELLED: Final = Diagnosis(
    scope="permanent", kind="cancelled", cause="cancelled before a job was created (launch cancel)"
)
LOST: Final = Diagnosis(scope="transient", kind="lost", cause="no job was created")


class RunEnded(LaunchError):
    """The run had already ended, so nothing was started. `job` is None if it no longer exists."""

    exit_code = 3

    def __init__(self, problem: str, hint: str, job: Job | None, diagnosis: Diagnosis) -> None:
        super().__init__(problem, hint)
        self.job = job
        self.diagnosis = diagnosis


class RunSucceeded(RunEnded):
    """The run had already succeeded."""

    exit_code = 0


def settle(ledger: Ledger, number: int, job: Job, diagnosis: Diagnosis, waited: float | None = None) -> AttemptEnd:
    """Record how an attempt ended, and return the end that is valid (see `prevails`). `waited`: seconds spent waiting
    for machines; None: as in the job."""
    waited = job.waited if waited is None else waited
    return ledger.note_end(number, diagnosis_of_run(ledger, job, diagnosis), job.state, job.billed, waited)


def diagnosis_of_run(ledger: Ledger, job: Job, diagnosis: Diagnosis) -> Diagnosis:
    """Return what a job's end means for the run. A job that succeeded without claiming an attempt that others claimed
    is a duplicate: its node noticed that and exited with 0."""
    if job.state == "SUCCEEDED" and (claiming := ledger.claiming_jobs()) and job.id not in claiming:
        return Diagnosis(scope="transient", kind="lost", cause=f"duplicate: job {claiming[-1]} claimed the run")
    return diagnosis


def release_resources(service: Jobs, job: Job, say: Callable[[str], None]) -> None:
    """Remove what an ended job left behind; report what can't be removed, because it is billed."""
    try:
        service.release(job)
    except LaunchError as error:
        say(f"could not remove the resources of {job.name}: {error.problem}\n{error.hint}".strip())


def cancel_and_confirm(service: Jobs, job: Job, clock: Clock, say: Callable[[str], None]) -> Job:
    """Cancel a job, wait for its end and return it. Raises StillRunning: no confirmation in time, so nothing may be
    created in its place."""
    until, requested, reported = clock.now() + service.stop_seconds, False, ""
    while clock.now() < until:
        try:
            if not requested:
                service.cancel(job.name)
                requested = True
            job = service.get(job.name)
        except GoneError:
            return replace(job, state=GONE)
        except UnreachableError as error:
            if error.problem != reported:
                say(error.problem)
            reported = error.problem
        if job.is_over:
            return job
        clock.sleep(POLL_SECONDS)
    if job.is_here:
        problem = f"{job.handle} is still running {exact_duration(service.stop_seconds)} after it was cancelled"
        raise LaunchError(problem, service.stuck_fix)
    raise StillRunning(
        f"{job.name} is still {job.state} {exact_duration(service.stop_seconds)} after the request to cancel it; "
        "nothing was created",
        service.stuck_fix or f"launch cancel {job.run or job.name}; then repeat the command",
    )


def run_ended_error(plan: Plan, entry: AttemptEntry, snapshot: RunSnapshot) -> RunEnded:
    """Return the error of a run that had already ended, with the commands that resume or repeat it."""
    if entry.end is None:
        raise ValueError("an open attempt has no end")
    job = next((job for job in snapshot.jobs if job.name == entry.job), None)
    if job is None and entry.zone and entry.job:  # a deleted VM; Vertex AI keeps its own records
        job = with_request(job_from_entry(entry), entry, plan)
    run = plan.run
    launch = job.command if job else command(vm=entry.zone is not None)
    if entry.end.kind == "succeeded":
        hint = f"{launch} --new starts a fresh run;\n{launch} --resume {run} continues in its folder"
        return RunSucceeded(f"run {run} has already succeeded; nothing to do", hint, job, entry.end)
    hint = f"{launch} --resume {run} resumes from its newest checkpoint, if it has one;\n--new starts a fresh run"
    fix = "" if "--resume" in entry.end.fix else entry.end.fix
    problem = f"run {run} has already ended, so nothing was started: {entry.end.cause}"
    return RunEnded(problem, f"{fix}\n{hint}".strip(), job, entry.end)


def no_attempt_left_error(plan: Plan, tries: Sequence[AttemptEntry]) -> LaunchError:
    """Return the error of a run for which no attempt is left, or no time to wait for machines.

    It lists what was tried, why each failed and what to do. Its exit code is that of the failure that stopped the run.
    """
    run, (lines, fixes) = plan.run, attempts_summary(tries)
    last = tries[-1].end if tries else None
    if is_wait_used_up(plan, tries) and not (last and last.stops):
        hours = (plan.limits.wait_total_seconds or 0) / 3600
        problem = f"run {run} waited for machines for limits.wait_total ({hours:g} h)"
        longer = f"To wait longer in total: --set limits.wait_total={ceil(hours) * 2}h"
        return NoCapacity(f"{problem}; attempts:\n{lines}", f"{longer}\n{fixes}".strip())
    if last is None or not last.stops:
        return NoCapacity(f"no capacity for run {run} in any placement of the plan; attempts:\n{lines}", fixes)
    return error_of(last)(f"run {run} was refused: {last.cause}" + (f"\n{lines}" if len(tries) > 1 else ""), fixes)


def block_next_attempt(ledger: Ledger, last: Job, diagnosis: Diagnosis) -> bool:
    """Block the next attempt of a run without an active job by locking its number as cancelled; return whether that
    was done.

    `diagnosis` is that of the run's last job, which may not be recorded yet. A launch that is about to lock that number
    finds it taken, takes a new snapshot, and sees that the run has ended. False: the run had already ended, was never
    launched with this ledger, or another launch locked the number first and is creating a job.
    """
    entries = ledger.entries()
    newest = next((entry for entry in reversed(entries) if entry.round), None)
    if newest is None:
        return False
    if newest.end:
        if newest.end.ends_run:
            return False
    elif newest.job is None or (newest.job == last.name and diagnosis.kind in RUN_ENDS):
        return False  # the newest attempt may be creating a job, to be cancelled once it exists
    facts = AttemptFacts(
        round=newest.round,
        region=newest.region,
        zone=newest.zone,
        provisioning=newest.provisioning,
        machine=newest.machine,
        identity=newest.identity,
    )
    entry = ledger.lock(entries[-1].number + 1, facts)
    if entry is None:
        return False
    ledger.note_end(entry.number, CANCELLED, "CANCELLED")
    return True
