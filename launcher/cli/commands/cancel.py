"""`launch cancel`: cancel a run in the cloud."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.cli.options import Output, OutputFormat, Regions, RunName
from launcher.errors import LaunchError

if TYPE_CHECKING:
    from launcher.backend.router import Services
    from launcher.cli.flows.cloud import CloudContext
    from launcher.cli.flows.find_run import Run
    from launcher.clock import Clock
    from launcher.jobs.job import Job


def cancel(
    run: RunName,
    *,
    regions: Regions = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Cancel a run and wait for confirmation.

    Its checkpoints stay in the run's folder; --resume RUN continues from them.
    """
    from launcher.cli.flows.cloud import here
    from launcher.cli.flows.find_run import one_run, searched
    from launcher.cli.flows.run_end import storage_of
    from launcher.cli.ui.job_text import run_folder_of
    from launcher.gcp.api import UnreachableError

    cloud = here()
    found = one_run(cloud, run, searched(regions))
    service = cloud.of_run(storage_of(run_folder_of(found.job)))
    active = [job for job in found.jobs if not job.is_over]
    ended, errors = cancel_jobs(service, cloud.clock, active)
    for job in ended:
        record_end(cloud, job)
    errors += release_ended(service, [job for job in found.jobs if job.is_over])
    done = bool(active) or block_next(cloud, found)
    if found.unread:
        errors.append(
            UnreachableError(
                f"{', '.join(found.unread)} could not be read; {found.id} may have a job there",
                f"Run launch cancel {found.id} again later.",
            )
        )
    error = errors[0] if errors else None
    jobs = ended or ([] if active else [found.job])
    show(found, jobs, output_format, error, done=done, only_blocked=done and not active)
    if error:
        raise error


def cancel_jobs(service: Services, clock: Clock, active: Sequence[Job]) -> tuple[list[Job], list[LaunchError]]:
    """Cancel all jobs, also after a failure; return those that ended, and the errors."""
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.runs.endings import cancel_and_confirm

    say = EventPrinter(None).say
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
            say(f"interrupted; {stop.__notes__[-1]}")
            raise
    return ended, errors


def record_end(cloud: CloudContext, job: Job) -> None:
    """Record in the run's folder how the attempt ended; no later launch may do it."""
    from launcher.backend.request import tried_by
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.cli.ui.job_text import run_folder_of
    from launcher.diagnosis import of_end
    from launcher.runs.endings import settle
    from launcher.runs.ledger import BucketLedger

    if not (folder := run_folder_of(job)):
        return
    try:
        ledger = BucketLedger.open(folder, cloud.clock, project=cloud.project)
        for entry in ledger.entries():
            if entry.job == job.name and entry.is_open:
                settle(ledger, entry.number, job, of_end(job, tried_by(job, cloud.project)))
    except LaunchError as error:
        EventPrinter(None).say(f"cannot record in its folder that {job.run} was cancelled: {error.problem}")


def release_ended(service: Services, over: Sequence[Job]) -> list[LaunchError]:
    """Delete what ended jobs left, such as a stopped VM; return the errors."""
    errors: list[LaunchError] = []
    for job in over:
        try:
            service.release(job)
        except LaunchError as error:
            errors.append(error)
    return errors


def block_next(cloud: CloudContext, run: Run) -> bool:
    """Block the next attempt of a run without an active job; return whether one was blocked."""
    from launcher.backend.request import tried_by
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.cli.ui.job_text import run_folder_of
    from launcher.diagnosis import of_end
    from launcher.runs.endings import block_next_attempt
    from launcher.runs.ledger import BucketLedger

    folder, say = run_folder_of(run.job), EventPrinter(None).say
    diagnosis = of_end(run.job, tried_by(run.job, cloud.project))
    try:
        return bool(folder) and block_next_attempt(
            BucketLedger.open(folder or "", cloud.clock, say, project=cloud.project), run.job, diagnosis
        )
    except LaunchError as error:
        say(f"cannot check whether another attempt of {run.id} is about to start: {error.problem}")
        return False


def show(
    run: Run, jobs: Sequence[Job], output: Output, error: LaunchError | None, *, done: bool, only_blocked: bool
) -> None:
    """Print the ended jobs; `error` ends the command. `done`: this command ended the run; `only_blocked`: by blocking
    its next attempt."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed

    if output is Output.text:
        for job in jobs:
            print(f"{'' if done else 'nothing to do: '}{end_text(run, job)}")
        if only_blocked:
            print("no further attempt will be made")
    elif jobs:
        data = [job_data(run.id, job) for job in jobs]
        printed({**data[0], "jobs": data}, output, error)


def end_text(run: Run, job: Job) -> str:
    """Return `my-job-0123abcd cancelled after 3 min 20 s (us-central1)`."""
    from launcher.cli.ui.event_printer import STATES, after

    folder = f"\nits folder: {job.folder}" if job.folder else ""  # a run on VMs is found by its folder from now on
    return f"{run.id} {STATES.get(job.state, job.state)}{after(job)} ({job.place}){folder}"
