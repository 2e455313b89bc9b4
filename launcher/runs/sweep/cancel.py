"""Cancel a sweep: its active points, and those that a launch may still start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launch_train.common.storage import LocalFolder
from launcher.errors import LaunchError
from launcher.gcp.parallel import in_pool
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.cancelling import Cancellation, cancel_run
from launcher.runs.find_local_run import RUNS
from launcher.runs.local_cancel import cancel_local, request_cancel
from launcher.runs.sweep.find import AT_A_TIME, runs_without_jobs
from launcher.runs.sweep.record import mark_cancelled
from launcher.services.local.folder_lock import is_taken

if TYPE_CHECKING:
    from launcher.clock import Clock
    from launcher.runs.cloud import CloudContext
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.find_run import FoundRun
    from launcher.runs.sweep.find import FoundSweep, LocalPoints


def cancel_points(
    cloud: CloudContext, sweep: FoundSweep, say: Callable[[str], None]
) -> tuple[list[Cancellation], list[LaunchError]]:
    """Cancel all points and wait for confirmation; return how each was cancelled, and all failures.

    A launch that still runs the sweep starts no further points.
    """
    results: list[Cancellation] = []
    errors: list[LaunchError] = []
    if sweep.output:
        try:
            with use_errors():
                mark_cancelled(open_folder(sweep.output), sweep.name)
        except LaunchError as error:
            say(f"cannot notify the running launch sweep of the cancellation: {error.problem}")

    def cancel(run: FoundRun) -> None:
        try:
            results.append(cancel_run(cloud, run, say))
        except LaunchError as error:
            errors.append(error)

    others, unread = runs_without_jobs(cloud, sweep)
    found = sorted((*sweep.runs, *others), key=lambda run: not run.is_active)
    in_pool([partial(cancel, run) for run in found], AT_A_TIME)
    return results, [*unread, *errors, *(error for one in results for error in one.errors)]


def cancel_here(name: str, points: LocalPoints, clock: Clock) -> list[LocalRun]:
    """Cancel the points on this machine that are running, and wait for their ends; return them.

    A `launch sweep` that still runs them starts no further points. Raises LaunchError: one still runs.
    """
    running = [run for run in points.runs if is_taken(run.folder)]
    with use_errors():
        mark_cancelled(LocalFolder(Path(RUNS)), name)
    for run in running:
        request_cancel(LocalFolder(run.folder))  # all at once: each may take a while to save
    for run in running:
        cancel_local(run, clock)
    return running
