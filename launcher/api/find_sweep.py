"""Find the runs of a sweep: in ./runs by the label in their plans, in the cloud by their jobs' label and its record."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launcher.api.find_local_run import RUNS, LocalRun, label_of, runs_below
from launcher.api.find_run import FoundRun, find_jobs, grouped
from launcher.api.sweep_record import read_record
from launcher.backend import request
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder, read_errors
from launcher.jobs.job import SWEEP_LABEL

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.api.cloud import CloudContext


class FoundSweep(Struct, frozen=True, kw_only=True):
    """A sweep in the cloud."""

    name: str
    runs: tuple[FoundRun, ...]
    """The runs with jobs. Other points have no job yet, or their jobs were deleted."""
    folders: dict[str, str]
    """Run ID -> folder, also for runs without jobs."""
    output: str = ""
    """The folder of the run folders; empty: unknown."""


def local_points(name: str) -> tuple[LocalRun, ...]:
    """Return the runs of a sweep in ./runs, newest first."""
    return tuple(one for one in runs_below(Path(RUNS)) if label_of(one, SWEEP_LABEL) == name)


def find_sweep(cloud: CloudContext, name: str, regions: Sequence[str]) -> FoundSweep | None:
    """Return a sweep by its name; None: neither a job nor a record in the default output has that name. Raises
    LaunchError: no region can be read."""
    listing = find_jobs(cloud, f'labels.{SWEEP_LABEL}="{name}"', regions)
    unread = tuple(listing.unread)
    runs = tuple(
        replace(run, unread=unread) for run in grouped(listing.jobs) if run.job.labels.get(SWEEP_LABEL) == name
    )
    folders = {run.id: folder for run in runs if (folder := request.run_folder(run.job.request))}
    output = next((folder.rpartition("/")[0] for folder in folders.values()), "")
    with suppress(LaunchError):  # without a record, what the jobs say must do
        storage = open_folder(output) if output else default_output(cloud)
        with read_errors():
            folders = {run: f"{storage.url}/{run}" for run in read_record(storage, name)} | folders
        output = storage.url
    return FoundSweep(name=name, runs=runs, folders=folders, output=output) if folders else None


def default_output(cloud: CloudContext) -> Storage:
    """Return the default output. Raises LaunchError: it is not the project's own bucket, or cannot be opened."""
    from launcher.gcp.default_bucket import check_default_bucket
    from launcher.plan import names

    check_default_bucket(cloud.project, os.environ, cloud.clock)
    return open_folder(names.default_output(cloud.project))
