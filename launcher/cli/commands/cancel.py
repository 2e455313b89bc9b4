"""`launch cancel`: cancel a run, or all points of a sweep."""

from __future__ import annotations

from msgspec.structs import replace

from launcher.cli.flows.confirm import confirm_for_another, confirmed, other_owner_of
from launcher.cli.flows.find_run import run_or_sweep
from launcher.cli.options import Last, Output, OutputFormat, Regions, RunName, YesForAnother
from launcher.cli.ui.data import job_data, run_document
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, after
from launcher.cli.ui.job_text import place_of
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.jobs.job import Job
from launcher.runs.cancelling import cancel_run
from launcher.runs.context import LocalContext
from launcher.runs.find import FoundRun
from launcher.runs.sweep.find import Sweep, active_points, cancel_sweep
from launcher.text import plural


def cancel(
    run: RunName,
    *,
    regions: Regions = None,
    last: Last = False,
    yes: YesForAnother = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Cancel a run or all points of a sweep.

    Waits for confirmation. Checkpoints stay in the run's folder; --resume RUN continues from them. Asks first if the
    run belongs to another account, and once for a sweep.
    """
    match run_or_sweep(run, regions, last=last):
        case Sweep() as sweep:
            cancel_points(sweep, output_format, yes=yes)
        case found:
            cancel_found(found, output_format, yes=yes)


def cancel_found(run: FoundRun, output: Output, *, yes: bool) -> None:
    """Cancel a run and print its ended jobs. Raises LaunchError: it may still run."""

    if not yes and run.is_active and not run.job.is_here:
        confirm_for_another(run.id, run.job.labels, "Cancel", "cancelled", f"launch cancel {run.id}")
    try:
        cancelled = cancel_run(run, say)
    except KeyboardInterrupt as stop:
        say(f"interrupted; {' '.join(getattr(stop, '__notes__', ()))}")
        raise
    error = next(iter(cancelled.errors), None)
    if output is Output.text:
        for job in cancelled.jobs:
            folder = f"\nits folder: {job.folder}" if job.folder and job.zone else ""  # finds a run on VMs from now on
            print(f"{'' if cancelled.done else 'nothing to do: '}{end_text(cancelled.run, job)}{folder}")
        if cancelled.only_blocked:
            print("no further attempt will be made")
    elif cancelled.jobs:
        jobs = [job_data(cancelled.run, job) for job in cancelled.jobs if not job.is_here]
        printed(run_document(replace(run, jobs=cancelled.jobs)) | {"jobs": jobs}, output, error)
    if error:
        raise error


def end_text(run: str, job: Job) -> str:
    """Return `my-job-0123abcd cancelled after 3 min 20 s (us-central1)`."""
    return f"{run} {STATES.get(job.state, job.state)}{after(job)} ({place_of(job)})"


def cancel_points(sweep: Sweep, output: Output, *, yes: bool) -> None:
    """Cancel all points of a sweep, after one question, and print how each ended.

    Raises LaunchError: the answer is no, or a job may still run.
    """
    if not yes and (active := active_points(sweep)):
        owner = next(filter(None, (other_owner_of(run.job) for run in active)), "")
        what = f"sweep {sweep.name} has {plural(len(active), 'active point')}{f' and {owner}' if owner else ''}"
        repeat = f"To cancel them: launch cancel {sweep.name} --yes"
        if not confirmed(f"The {what}.\nCancel all of them?", what, repeat):
            raise LaunchError(f"{sweep.name} was not cancelled")
    cancelled, errors = cancel_sweep(sweep, say)
    done = sorted((point for point in cancelled if point.done), key=lambda point: point.run)
    if output is Output.text:
        count = f"{plural(len(done), 'point')} cancelled" if done else "nothing to do: no point was running"
        for point in done:
            ends = [end_text(point.run, job) for job in point.jobs]
            print("\n".join([f"{point.run} no further attempt will be made"] if point.only_blocked else ends))
        print(f"{sweep.name}: {count}")
    else:
        runs = [
            run_document(FoundRun(id=point.run, jobs=(job,), context=LocalContext()))  # its folder is read at once
            if job.is_here
            else job_data(point.run, job)
            for point in done
            for job in point.jobs
        ]
        printed({"sweep": sweep.name, "runs": runs}, output, next(iter(errors), None))
    if errors:
        raise errors[0]
