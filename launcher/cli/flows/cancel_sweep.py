"""Cancel a sweep, after one question, and print how each of its points ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import launcher.clock
from launcher.cli.flows.cloud import here
from launcher.cli.flows.confirm import confirmed, other_owner
from launcher.cli.options import Output
from launcher.cli.ui.data import job_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, EventPrinter, after
from launcher.errors import LaunchError
from launcher.runs.find_run import FoundRun
from launcher.runs.sweep.cancel import cancel_here, cancel_points
from launcher.runs.sweep.find import active_points
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.sweep.find import Sweep


def cancel_sweep(sweep: Sweep, output: Output, *, yes: bool) -> None:
    """Cancel all points of a sweep. Raises LaunchError: the answer is no, or a job may still run."""
    from launcher.cli.flows.local_status import as_data, read_snapshot

    if not yes:
        confirm(sweep)
    stopped: Sequence[LocalRun] = []
    cancelled: list[Cancellation] = []
    errors: list[LaunchError] = []
    try:
        if sweep.here:
            stopped = cancel_here(sweep.name, sweep.here, launcher.clock.REAL)
    except LaunchError as error:
        errors.append(error)
    if sweep.cloud:
        cancelled, others = cancel_points(here(), sweep.cloud, EventPrinter(None).say)
        errors += others
    done = sorted((one for one in cancelled if one.done), key=lambda one: one.run)
    states = [(run, read_snapshot(run)) for run in stopped]
    if output is Output.text:
        local = (f"{run.id} {snapshot.state.lower()} (this machine)" for run, snapshot in states)
        ended = [*local, *map(line, done)]
        count = f"{plural(len(ended), 'point')} cancelled" if ended else "nothing to do: no point was running"
        print("\n".join([*ended, f"{sweep.name}: {count}"]))
    else:
        jobs = [job_data(one.run, job) for one in done for job in one.jobs]
        runs = [*(as_data(run, snapshot) for run, snapshot in states), *jobs]
        printed({"sweep": sweep.name, "runs": runs}, output, next(iter(errors), None))
    if errors:
        raise errors[0]


def confirm(sweep: Sweep) -> None:
    """Ask once for all active points. Raises LaunchError: the answer is no, or there is no terminal."""
    active = active_points(sweep)
    if not active:
        return
    labels = (run.job.labels for run in active if isinstance(run, FoundRun))
    owner = next(filter(None, map(other_owner, labels)), "")
    what = f"sweep {sweep.name} has {plural(len(active), 'active point')}{f' and {owner}' if owner else ''}"
    if not confirmed(f"The {what}.\nCancel all of them?", what, f"To cancel them: launch cancel {sweep.name} --yes"):
        raise LaunchError(f"{sweep.name} was not cancelled")


def line(cancelled: Cancellation) -> str:
    """Return `my-job-0123abcd cancelled after 3 min 20 s (us-central1)`."""
    if cancelled.only_blocked:
        return f"{cancelled.run} no further attempt will be made"
    return "\n".join(
        f"{cancelled.run} {STATES.get(job.state, job.state)}{after(job)} ({job.place})" for job in cancelled.jobs
    )
