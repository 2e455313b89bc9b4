"""Cancel a sweep: its active points, and those that a launch may still start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from launcher.api.cancelling import Cancellation, cancel_run
from launcher.api.find_run import in_folder
from launcher.api.sweep_record import mark_cancelled
from launcher.errors import LaunchError
from launcher.gcp.parallel import in_pool
from launcher.gcp.storage import open_folder, use_errors

if TYPE_CHECKING:
    from launcher.api.cloud import CloudContext
    from launcher.api.find_run import FoundRun
    from launcher.api.find_sweep import FoundSweep

AT_A_TIME: Final = 16


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
            say(f"cannot tell a running launch sweep that it is cancelled: {error.problem}")

    def cancel(run: FoundRun) -> None:
        try:
            results.append(cancel_run(cloud, run, say))
        except LaunchError as error:
            errors.append(error)

    found = list(sweep.runs)

    def look_up(folder: str) -> None:
        try:
            if run := in_folder(cloud, folder):
                found.append(run)
        except LaunchError as error:
            errors.append(error)

    # Points whose job is another sweep's, whose VM is gone between two attempts, or that were started meanwhile.
    known = {run.id for run in sweep.runs}
    in_pool([partial(look_up, folder) for run, folder in sweep.folders.items() if run not in known], AT_A_TIME)
    in_pool([partial(cancel, run) for run in sorted(found, key=lambda run: not run.is_active)], AT_A_TIME)
    return results, [*errors, *(error for one in results for error in one.errors)]
