"""`launch cancel`: cancel a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.options import Last, Output, OutputFormat, Regions, RunName, YesForAnother

if TYPE_CHECKING:
    from launcher.errors import LaunchError
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.find import FoundRun


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
            from launcher.cli.flows.cancel_sweep import cancel_points

            cancel_points(sweep, output_format, yes=yes)
        case found:
            cancel_found(found, output_format, yes=yes)


def cancel_found(run: FoundRun, output: Output, *, yes: bool) -> None:
    """Cancel a run. Raises LaunchError: it may still run."""
    from launcher.cli.flows.confirm import confirm_for_another
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.runs.cancelling import cancel_run

    say = EventPrinter(None).say
    if not yes and run.is_active and not run.job.is_here:
        confirm_for_another(run.id, run.job.labels, "Cancel", "cancelled", f"launch cancel {run.id}")
    try:
        cancelled = cancel_run(run, say)
    except KeyboardInterrupt as stop:
        say(f"interrupted; {' '.join(getattr(stop, '__notes__', ()))}")
        raise
    error = next(iter(cancelled.errors), None)
    show(run, cancelled, output, error)
    if error:
        raise error


def show(run: FoundRun, cancelled: Cancellation, output: Output, error: LaunchError | None) -> None:
    """Print the ended jobs; `error` ends the command."""
    from msgspec.structs import replace

    from launcher.cli.ui.data import job_data, status_data
    from launcher.cli.ui.documents import printed
    from launcher.runs.run import status_of
    from launcher.runs.run_story import story_of

    if output is Output.text:
        from launcher.cli.ui.event_printer import STATES, after
        from launcher.cli.ui.job_text import place_of

        for job in cancelled.jobs:
            end = f"{cancelled.run} {STATES.get(job.state, job.state)}{after(job)} ({place_of(job)})"
            folder = f"\nits folder: {job.folder}" if job.folder and job.zone else ""  # finds a run on VMs from now on
            print(f"{'' if cancelled.done else 'nothing to do: '}{end}{folder}")
        if cancelled.only_blocked:
            print("no further attempt will be made")
    elif cancelled.jobs:
        ended = replace(run, jobs=cancelled.jobs)
        status = status_of(ended)
        jobs = [job_data(cancelled.run, job) for job in cancelled.jobs if not job.is_here]
        printed(status_data(status, story_of(ended, status.attempts)) | {"jobs": jobs}, output, error)
