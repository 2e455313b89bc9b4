"""Cancel a sweep, after one question, and print how each of its points ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli.flows.confirm import confirmed, other_owner
from launcher.cli.options import Output
from launcher.cli.ui.data import job_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, EventPrinter, after
from launcher.cli.ui.job_text import place_of
from launcher.errors import LaunchError
from launcher.runs.sweep.cancel import cancel_sweep
from launcher.runs.sweep.find import active_points
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.sweep.find import Sweep


def cancel_points(sweep: Sweep, output: Output, *, yes: bool) -> None:
    """Cancel all points of a sweep. Raises LaunchError: the answer is no, or a job may still run."""
    if not yes:
        confirm(sweep)
    cancelled, errors = cancel_sweep(sweep, EventPrinter(None).say)
    done = sorted((point for point in cancelled if point.done), key=lambda point: point.run)
    if output is Output.text:
        count = f"{plural(len(done), 'point')} cancelled" if done else "nothing to do: no point was running"
        print("\n".join([*map(line, done), f"{sweep.name}: {count}"]))
    else:
        runs = [job_data(point.run, job) for point in done for job in point.jobs]
        printed({"sweep": sweep.name, "runs": runs}, output, next(iter(errors), None))
    if errors:
        raise errors[0]


def confirm(sweep: Sweep) -> None:
    """Ask once for all active points. Raises LaunchError: the answer is no, or there is no terminal."""
    active = active_points(sweep)
    if not active:
        return
    owner = next(filter(None, (other_owner(run.job.labels) for run in active)), "")
    what = f"sweep {sweep.name} has {plural(len(active), 'active point')}{f' and {owner}' if owner else ''}"
    if not confirmed(f"The {what}.\nCancel all of them?", what, f"To cancel them: launch cancel {sweep.name} --yes"):
        raise LaunchError(f"{sweep.name} was not cancelled")


def line(cancelled: Cancellation) -> str:
    """Return `my-job-0123abcd cancelled after 3 min 20 s (us-central1)`."""
    if cancelled.only_blocked:
        return f"{cancelled.run} no further attempt will be made"
    return "\n".join(
        f"{cancelled.run} {STATES.get(job.state, job.state)}{after(job)} ({place_of(job)})" for job in cancelled.jobs
    )
