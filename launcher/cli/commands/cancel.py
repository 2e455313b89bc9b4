"""`launch cancel`: cancel a run, or all points of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.cli.options import Last, Output, OutputFormat, Regions, RunName, YesForAnother
from launcher.errors import LaunchError
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.jobs.job import Job
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.find import FoundRun
    from launcher.runs.sweep.find import Sweep


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
    from launcher.cli.flows.find_run import run_or_sweep
    from launcher.runs.sweep.find import Sweep

    match run_or_sweep(run, regions, last=last):
        case Sweep() as sweep:
            cancel_points(sweep, output_format, yes=yes)
        case found:
            cancel_found(found, output_format, yes=yes)


def cancel_found(run: FoundRun, output: Output, *, yes: bool) -> None:
    """Cancel a run and print its ended jobs. Raises LaunchError: it may still run."""
    from msgspec.structs import replace

    from launcher.cli.flows.confirm import confirm_for_another
    from launcher.cli.ui.data import job_data, run_document
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.streams import say
    from launcher.runs.cancelling import cancel_run

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
    from launcher.cli.ui.event_printer import STATES, after
    from launcher.cli.ui.job_text import place_of

    return f"{run} {STATES.get(job.state, job.state)}{after(job)} ({place_of(job)})"


def cancel_points(sweep: Sweep, output: Output, *, yes: bool) -> None:
    """Cancel all points of a sweep, after one question, and print how each ended.

    Raises LaunchError: the answer is no, or a job may still run.
    """
    from launcher.cli.flows.confirm import confirmed, other_owner_of
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.streams import say
    from launcher.runs.sweep.cancel import cancel_sweep
    from launcher.runs.sweep.find import active_points

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
        print("\n".join([*map(point_text, done), f"{sweep.name}: {count}"]))
    else:
        runs = [point_data(point.run, job) for point in done for job in point.jobs]
        printed({"sweep": sweep.name, "runs": runs}, output, next(iter(errors), None))
    if errors:
        raise errors[0]


def point_text(point: Cancellation) -> str:
    """Return how the jobs of a point ended, a line each."""
    if point.only_blocked:
        return f"{point.run} no further attempt will be made"
    return "\n".join(end_text(point.run, job) for job in point.jobs)


def point_data(run: str, job: Job) -> dict[str, Any]:
    """Return a point for scripts; on this machine with its status, whose folder is read at once."""
    from launcher.cli.ui.data import job_data, run_document
    from launcher.runs.context import LocalContext
    from launcher.runs.find import FoundRun

    return run_document(FoundRun(id=run, jobs=(job,), context=LocalContext())) if job.is_here else job_data(run, job)
