"""`launch cancel`: cancel a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.options import Last, Output, OutputFormat, Regions, RunName, YesForAnother

if TYPE_CHECKING:
    from launcher.errors import LaunchError
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.find_run import FoundRun


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
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.sweep.find import Sweep

    found = run_or_sweep(run, regions, last=last)
    if isinstance(found, Sweep):
        from launcher.cli.flows.cancel_sweep import cancel_sweep

        cancel_sweep(found, output_format, yes=yes)
    elif isinstance(found, LocalRun):
        cancel_here(found, output_format)
    else:
        cancel_in_cloud(run, found, output_format, yes=yes)


def cancel_here(run: LocalRun, output: Output) -> None:
    """Cancel a run on this machine. Raises LaunchError: it still runs."""
    import launcher.clock
    from launcher.cli.flows.local_status import read_snapshot, show_local
    from launcher.runs.local_cancel import cancel_local

    done = cancel_local(run, launcher.clock.REAL)
    if output is Output.text:
        state = read_snapshot(run).state.lower()
        print(f"{'' if done else 'nothing to do: '}{run.id} {state} (this machine)")
    else:
        show_local(run, output)


def cancel_in_cloud(run: str, found: FoundRun, output: Output, *, yes: bool) -> None:
    """Cancel a run in the cloud, which the user called `run`. Raises LaunchError."""
    from launcher.cli.flows.cloud import of_run
    from launcher.cli.flows.confirm import confirm_for_another
    from launcher.cli.ui.event_printer import EventPrinter
    from launcher.runs.cancelling import cancel_run

    cloud, say = of_run(run)[0], EventPrinter(None).say
    if not yes and found.is_active:
        confirm_for_another(found.id, found.job.labels, "Cancel", "cancelled", f"launch cancel {found.id}")
    try:
        cancelled = cancel_run(cloud, found, say)
    except KeyboardInterrupt as stop:
        say(f"interrupted; {' '.join(getattr(stop, '__notes__', ()))}")
        raise
    error = next(iter(cancelled.errors), None)
    show(cancelled, output, error)
    if error:
        raise error


def show(cancelled: Cancellation, output: Output, error: LaunchError | None) -> None:
    """Print the ended jobs; `error` ends the command."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed

    if output is Output.text:
        from launcher.cli.ui.event_printer import STATES, after

        for job in cancelled.jobs:
            end = f"{cancelled.run} {STATES.get(job.state, job.state)}{after(job)} ({job.place})"
            folder = f"\nits folder: {job.folder}" if job.folder else ""  # finds a run on VMs from now on
            print(f"{'' if cancelled.done else 'nothing to do: '}{end}{folder}")
        if cancelled.only_blocked:
            print("no further attempt will be made")
    elif cancelled.jobs:
        data = [job_data(cancelled.run, job) for job in cancelled.jobs]
        printed({**data[0], "jobs": data}, output, error)
