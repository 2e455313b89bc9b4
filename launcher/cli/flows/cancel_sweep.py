"""Cancel a sweep, after one question, and print how each of its points ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.cli.flows.confirm import confirmed, other_owner_of
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
    from launcher.jobs.job import Job
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
        runs = [point_data(point.run, job) for point in done for job in point.jobs]
        printed({"sweep": sweep.name, "runs": runs}, output, next(iter(errors), None))
    if errors:
        raise errors[0]


def point_data(run: str, job: Job) -> dict[str, Any]:
    """Return a point for scripts; on this machine with its status, whose folder is read at once."""
    from launcher.cli.ui.data import status_data
    from launcher.runs.context import LocalContext
    from launcher.runs.find import FoundRun
    from launcher.runs.run import status_of
    from launcher.runs.run_story import story_of

    if not job.is_here:
        return job_data(run, job)
    point = FoundRun(id=run, jobs=(job,), context=LocalContext())
    status = status_of(point)
    return status_data(status, story_of(point, status.attempts))


def confirm(sweep: Sweep) -> None:
    """Ask once for all active points. Raises LaunchError: the answer is no, or there is no terminal."""
    active = active_points(sweep)
    if not active:
        return
    owner = next(filter(None, (other_owner_of(run.job) for run in active)), "")
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
