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
from launcher.runs.find import RUNS
from launcher.runs.sweep.find import AT_A_TIME, runs_without_jobs
from launcher.runs.sweep.record import mark_cancelled

if TYPE_CHECKING:
    from launcher.runs.find import FoundRun
    from launcher.runs.sweep.find import Sweep


def cancel_sweep(sweep: Sweep, say: Callable[[str], None]) -> tuple[list[Cancellation], list[LaunchError]]:
    """Cancel all points and wait for confirmation; return how each was cancelled, and all failures.

    A launch that still runs the sweep starts no further points.
    """
    results: list[Cancellation] = []
    errors: list[LaunchError] = []
    if sweep.here:
        try:
            with use_errors():
                mark_cancelled(LocalFolder(Path(RUNS)), sweep.name)
        except LaunchError as error:
            errors.append(error)
    if sweep.cloud and sweep.cloud.output:
        try:
            with use_errors():
                mark_cancelled(open_folder(sweep.cloud.output), sweep.name)
        except LaunchError as error:
            say(f"cannot notify the running launch sweep of the cancellation: {error.problem}")

    def cancel(run: FoundRun) -> None:
        try:
            results.append(cancel_run(run, say))
        except LaunchError as error:
            errors.append(error)

    others, unread = runs_without_jobs(sweep.cloud) if sweep.cloud else ([], [])  # after the mark: see in_cloud
    points = sorted((*sweep.runs, *others), key=lambda run: not run.is_active)
    in_pool([partial(cancel, run) for run in points], AT_A_TIME)
    return results, [*unread, *errors, *(error for result in results for error in result.errors)]
