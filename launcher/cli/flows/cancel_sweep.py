"""Cancel a sweep, after one question, and print how each of its points ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.api.cancel_sweep import cancel_points
from launcher.cli.flows.cloud import here
from launcher.cli.flows.confirm import confirmed, other_owner
from launcher.cli.options import Output
from launcher.cli.ui.data import job_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, EventPrinter, after
from launcher.errors import LaunchError
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.api.cancelling import Cancellation
    from launcher.api.find_sweep import FoundSweep


def cancel_sweep(sweep: FoundSweep, output: Output, *, yes: bool) -> None:
    """Cancel all points of a sweep. Raises LaunchError: the answer is no, or a job may still run."""
    active = [run for run in sweep.runs if run.is_active]
    if active and not yes:
        owner = next((text for run in active if (text := other_owner(run.job.labels))), "")
        what = f"sweep {sweep.name} has {plural(len(active), 'active point')}{f' and {owner}' if owner else ''}"
        if not confirmed(
            f"The {what}.\nCancel all of them?", what, f"To cancel them: launch cancel {sweep.name} --yes"
        ):
            raise LaunchError(f"{sweep.name} was not cancelled")
    results, errors = cancel_points(here(), sweep, EventPrinter(None).say)
    done = sorted((one for one in results if one.done), key=lambda one: one.run)
    error = next(iter(errors), None)
    if output is Output.text:
        print("\n".join([*map(line, done), f"{sweep.name}: {plural(len(done), 'point')} cancelled"]))
    else:
        printed(
            {"sweep": sweep.name, "runs": [job_data(one.run, job) for one in done for job in one.jobs]}, output, error
        )
    if error:
        raise error


def line(cancelled: Cancellation) -> str:
    """Return `my-job-0123abcd cancelled after 3 min 20 s (us-central1)`."""
    if cancelled.only_blocked:
        return f"{cancelled.run} no further attempt will be made"
    return "\n".join(
        f"{cancelled.run} {STATES.get(job.state, job.state)}{after(job)} ({job.place})" for job in cancelled.jobs
    )
