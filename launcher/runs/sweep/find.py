"""Find the runs of a sweep: in ./runs by the label in their plans, in the cloud by their jobs' label and its record.

`cancel_sweep` cancels its active points, and those that a launch may still start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launch_train.common.storage import LocalFolder, Storage
from launcher.errors import LaunchError
from launcher.gcp.default_bucket import check_default_bucket
from launcher.gcp.parallel import in_pool
from launcher.gcp.storage import open_folder, read_errors, use_errors
from launcher.jobs.job import SWEEP_LABEL
from launcher.plan import names
from launcher.runs.cancelling import Cancellation, cancel_run
from launcher.runs.find import RUNS, FoundRun, grouped, in_folder, label_of, local_run, run_folders
from launcher.runs.sweep.record import mark_cancelled, read_record

if TYPE_CHECKING:
    from launcher.runs.cloud import CloudContext

AT_A_TIME: Final = 16
"""Run folders read in parallel."""

Values = Mapping[str, Mapping[str, Any]]
"""The value of each swept setting, by run ID."""


class LocalPoints(Struct, frozen=True, kw_only=True):
    """A sweep on this machine."""

    runs: tuple[FoundRun, ...]
    """Those that have been started, newest first."""
    values: Values
    """Of all points; empty: there is no record."""


class FoundSweep(Struct, frozen=True, kw_only=True):
    """A sweep in the cloud."""

    name: str
    context: CloudContext
    runs: tuple[FoundRun, ...]
    """The runs with jobs. Other points have no job yet, or their jobs were deleted."""
    folders: dict[str, str]
    """Run ID -> folder, also for runs without jobs."""
    output: str = ""
    """The folder of the run folders; empty: unknown."""
    values: Values = {}
    """Of all points; empty: there is no record."""


class Sweep(Struct, frozen=True, kw_only=True):
    """A sweep: its points on this machine and in the cloud. Both have the same name if the same sweep ran in both."""

    name: str
    here: LocalPoints | None
    cloud: FoundSweep | None

    @property
    def runs(self) -> tuple[FoundRun, ...]:
        """Return the runs on this machine, then those with jobs in the cloud; each in the order of the points."""
        order = {run: place for place, run in enumerate(self.known)}
        both: tuple[Sequence[FoundRun], ...] = (
            self.here.runs if self.here else (),
            self.cloud.runs if self.cloud else (),
        )
        return tuple(run for runs in both for run in sorted(runs, key=lambda run: order.get(run.id, len(order))))

    @property
    def values(self) -> Values:
        """Return the value of each swept setting, by run ID in the order of the points."""
        return {**(self.here.values if self.here else {}), **(self.cloud.values if self.cloud else {})}

    @property
    def known(self) -> tuple[str, ...]:
        """Return the IDs of all known runs, in the order of the points."""
        started = [run.id for run in reversed(self.here.runs)] if self.here else []
        return tuple(dict.fromkeys([*self.values, *started, *(self.cloud.folders if self.cloud else ())]))


def active_points(sweep: Sweep) -> list[FoundRun]:
    """Return the points that are running or waiting for machines."""
    return [run for run in sweep.runs if run.is_active]


def local_points(name: str) -> LocalPoints | None:
    """Return a sweep in ./runs; None: no run and no record has its name."""
    folders = (folder for folder in run_folders(Path(RUNS)) if label_of(folder, SWEEP_LABEL) == name)
    runs = tuple(run for folder in folders if (run := local_run(folder)))
    with read_errors():
        values = read_record(LocalFolder(Path(RUNS)), name)
    return LocalPoints(runs=runs, values=values) if runs or values else None


def find_sweep(cloud: CloudContext, name: str, regions: Sequence[str]) -> FoundSweep | None:
    """Return a sweep by its name; None: neither a job nor a record in the default output has that name. Raises
    LaunchError: no region can be read."""
    listing = cloud.find_jobs(f'labels.{SWEEP_LABEL}="{name}"', regions)
    unread = tuple(listing.unread)
    runs = tuple(
        replace(run, unread=unread) for run in grouped(listing.jobs, cloud) if run.job.labels.get(SWEEP_LABEL) == name
    )
    folders = {run.id: folder for run in runs if (folder := run.folder)}
    output = next((folder.rpartition("/")[0] for folder in folders.values()), "")
    values: Values = {}
    with suppress(LaunchError):  # without a record, what the jobs say must do
        storage = open_folder(output) if output else default_output(cloud)
        with read_errors():
            values = read_record(storage, name)
        folders = {run: f"{storage.url}/{run}" for run in values} | folders
        output = storage.url
    return (
        FoundSweep(name=name, context=cloud, runs=runs, folders=folders, output=output, values=values)
        if folders
        else None
    )


def runs_without_jobs(sweep: FoundSweep) -> tuple[list[FoundRun], list[LaunchError]]:
    """Return the runs of points that no listed job is of, by their folders, and all failures.

    Their job is another sweep's, their VM is deleted, or they were started meanwhile.
    """
    runs: list[FoundRun] = []
    errors: list[LaunchError] = []

    def look_up(folder: str) -> None:
        try:
            if run := in_folder(sweep.context, folder):
                runs.append(run)
        except LaunchError as error:
            errors.append(error)

    known = {run.id for run in sweep.runs}
    in_pool([partial(look_up, folder) for run, folder in sweep.folders.items() if run not in known], AT_A_TIME)
    return runs, errors


def default_output(cloud: CloudContext) -> Storage:
    """Return the default output. Raises LaunchError: it is not the project's own bucket, or cannot be opened."""
    check_default_bucket(cloud.project, os.environ, cloud.clock)
    return open_folder(names.default_output(cloud.project))


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
