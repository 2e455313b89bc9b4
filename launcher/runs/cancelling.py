"""Cancel a run: its active jobs, its next attempt, and resources that ended jobs left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.diagnosis import diagnose_end
from launcher.errors import LaunchError, UnreachableError
from launcher.runs.driver import LOCK_SECONDS, POLL_SECONDS
from launcher.runs.endings import block_next_attempt, cancel_and_confirm, settle
from launcher.runs.ledger import Ledger
from launcher.services import request

if TYPE_CHECKING:
    from launcher.clock import Clock
    from launcher.jobs.job import Job
    from launcher.runs.context import RunContext
    from launcher.runs.find import FoundRun
    from launcher.services.base import Jobs


class Cancellation(Struct, frozen=True, kw_only=True):
    """The result of cancelling a run."""

    run: str
    jobs: tuple[Job, ...]
    """The jobs that ended; if none was active, the run's newest job."""
    done: bool
    """True: this call ended the run. False: it had already ended."""
    only_blocked: bool = False
    """True: no job was active, and the next attempt was blocked."""
    errors: tuple[LaunchError, ...] = ()
    """Failures, because of which jobs may still run or cost money."""


def cancel_run(run: FoundRun, say: Callable[[str], None]) -> Cancellation:
    """Cancel a run and wait for confirmation; failures are in the result. Its checkpoints stay in its folder.

    Raises KeyboardInterrupt with a note that the run may still be cancelled.
    """
    service = run.context.of_run(run.storage)
    active = [job for job in run.jobs if not job.is_over] or jobs_being_created(service, run, say)
    ended, errors = cancel_jobs(service, run.context.clock, active, say)
    for job in ended:
        record_end(run.context, job, say)
    errors += release_ended(service, [job for job in run.jobs if job.is_over])
    done = bool(active) or block_next(run, say)
    if run.unread:
        errors.append(
            UnreachableError(
                f"{', '.join(run.unread)} could not be read; {run.id} may have a job there",
                f"Run launch cancel {run.id} again later.",
            )
        )
    jobs = ended or ([] if active else [run.job])
    return Cancellation(run=run.id, jobs=tuple(jobs), done=done, only_blocked=done and not active, errors=tuple(errors))


def jobs_being_created(service: Jobs, run: FoundRun, say: Callable[[str], None]) -> list[Job]:
    """Return the job that another launch is creating for a run without an active job, once it exists; empty if it
    creates none, or its lock expires."""
    if not run.folder:
        return []
    clock = run.context.clock
    known, waited = {job.name for job in run.jobs}, False
    try:
        # without `say`: block_next reports a folder that cannot be written
        ledger = Ledger.open(run.folder, clock, project=run.context.project)
        while (entry := next(reversed(ledger.entries()), None)) and entry.round and entry.is_open:
            if entry.job:
                return [] if entry.job in known or (job := service.get(entry.job)).is_over else [job]
            if ledger.lock_age(entry.number) >= LOCK_SECONDS:
                return []
            if not waited:
                say(f"another launch is submitting attempt {entry.number} of {run.id}; waiting for its job")
                waited = True
            clock.sleep(POLL_SECONDS)
    except LaunchError as error:
        say(f"cannot check whether a job of {run.id} is being created: {error.problem}")
    return []


def cancel_jobs(
    service: Jobs, clock: Clock, active: Sequence[Job], say: Callable[[str], None]
) -> tuple[list[Job], list[LaunchError]]:
    """Cancel all jobs, even if one fails; return those that ended, and the errors."""

    ended: list[Job] = []
    errors: list[LaunchError] = []
    for job in active:
        try:
            ended.append(cancel_and_confirm(service, job, clock, say))
            service.release(job)
        except LaunchError as error:
            errors.append(error)
        except KeyboardInterrupt as stop:
            stop.add_note(f"{job.run} may still be cancelled\nlaunch status {job.run} shows its state")
            raise
    return ended, errors


def record_end(context: RunContext, job: Job, say: Callable[[str], None]) -> None:
    """Record in the run's folder how the attempt ended: there may be no later launch that would."""

    if not (folder := request.run_folder(job.request)):
        return
    try:
        ledger = Ledger.open(folder, context.clock, project=context.project)
        for entry in ledger.entries():
            if entry.job == job.name and entry.is_open:
                settle(ledger, entry.number, job, diagnose_end(job, request.context_of_job(job, context.project)))
    except LaunchError as error:
        say(f"cannot record in its folder that {job.run} was cancelled: {error.problem}")


def release_ended(service: Jobs, over: Sequence[Job]) -> list[LaunchError]:
    """Delete what ended jobs left behind, such as a stopped VM; return the errors."""
    errors: list[LaunchError] = []
    for job in over:
        try:
            service.release(job)
        except LaunchError as error:
            errors.append(error)
    return errors


def block_next(run: FoundRun, say: Callable[[str], None]) -> bool:
    """Block the next attempt of a run without an active job; return whether one was blocked."""

    context = run.context
    diagnosis = diagnose_end(run.job, request.context_of_job(run.job, context.project))
    try:
        return bool(run.folder) and block_next_attempt(
            Ledger.open(run.folder or "", context.clock, say, project=context.project), run.job, diagnosis
        )
    except LaunchError as error:
        say(f"cannot check whether another attempt of {run.id} is about to start: {error.problem}")
        return False
