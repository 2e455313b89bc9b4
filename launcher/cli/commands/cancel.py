"""`launch cancel`: end a run in the cloud."""

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
    ended, errors = cancelled(service, cloud.clock, active)
    for job in ended:
        note(cloud, job)
    errors += not_removed(service, [job for job in found.jobs if job.is_over])
    done = bool(active) or block_next(cloud, found)
    if found.unread:
        errors.append(
            UnreachableError(
                f"whether {found.id} has a job in {', '.join(found.unread)} isn't known: that couldn't be read",
                f"launch cancel {found.id} again, once it can be.",
            )
        )
    error = errors[0] if errors else None
    jobs = ended or ([] if active else [found.job])
    show(found, jobs, output_format, error, done=done, only_barred=done and not active)
    if error:
        raise error


def cancelled(service: Services, clock: Clock, active: Sequence[Job]) -> tuple[list[Job], list[LaunchError]]:
    """The jobs once they have ended, and what went wrong with others: one that can't be cancelled keeps none alive."""
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
            stop.add_note(f"{job.run} may end all the same\nlaunch status {job.run} shows that")
            say(f"interrupted; {stop.__notes__[-1]}")
            raise
    return ended, errors


def note(cloud: CloudContext, job: Job) -> None:
    """Note how the attempt ended, in the run's folder: nobody may ever launch the run again."""
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
        EventPrinter(None).say(f"that {job.run} was cancelled can't be noted in its folder: {error.problem}")


def not_removed(service: Services, over: Sequence[Job]) -> list[LaunchError]:
    """What jobs that had ended before have left and could not be removed: a VM that was stopped, say."""
    errors: list[LaunchError] = []
    for job in over:
        try:
            service.release(job)
        except LaunchError as error:
            errors.append(error)
    return errors


def block_next(cloud: CloudContext, run: Run) -> bool:
    """Whether a run without a job was kept from making another: some launch may be between two attempts."""
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
        say(f"whether some launch is about to make another job of {run.id} can't be seen: {error.problem}")
        return False


def show(
    run: Run, jobs: Sequence[Job], output: Output, error: LaunchError | None, *, done: bool, only_barred: bool
) -> None:
    """The jobs as they have ended; `error` ends the command. `done`: by this command; `only_barred`: it had no more to
    do than to keep the run from another attempt."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed

    if output is Output.text:
        for job in jobs:
            print(f"{'' if done else 'nothing to do: '}{end_text(run, job)}")
        if only_barred:
            print("no other attempt will be made")
    elif jobs:
        data = [job_data(run.id, job) for job in jobs]
        printed({**data[0], "jobs": data}, output, error)


def end_text(run: Run, job: Job) -> str:
    """`my-job-0123abcd was cancelled after 3 min 20 s (us-central1)`."""
    from launcher.cli.ui.event_printer import STATES, after

    folder = f"\nits folder: {job.folder}" if job.folder else ""  # by that a VM's run is found from now on
    return f"{run.id} {STATES.get(job.state, job.state)}{after(job)} ({job.place}){folder}"
