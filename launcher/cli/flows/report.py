"""Write the report of one or several runs to a file on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launch_train.report import page
from launch_train.runfolder.run import RunData, read_run
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError, UsageError
from launcher.gcp.storage import read_errors
from launcher.services.local.folder_lock import is_taken
from launcher.text import plural

READERS: Final = 8
"""Runs read in parallel."""


def write_report(runs: Mapping[str, Storage], target: Path | None = None, sweep: str = "") -> Path:
    """Write the page of some runs, by run ID, and return its path: `target`, else in the folder of a single local run,
    else in the current folder. Points of a `sweep` that have not begun are left out. Raises LaunchError."""
    with read_errors(), ThreadPoolExecutor(READERS) as threads:
        records = [*threads.map(read_whole_run, runs.values())]
    empty = [run.id for run in records if not run.starts and not run.attempts]
    if empty and (not sweep or len(empty) == len(records)):
        raise UsageError(f"{', '.join(empty)}: the run folder has no attempts and no metrics yet", "Try again later.")
    if empty:
        say(f"{plural(len(empty), 'point')} of {len(records)} not started yet")
        records = [run for run in records if run.id not in empty]
    if target is None:
        storage = next(iter(runs.values()))
        alone = len(runs) == 1 and isinstance(storage, LocalFolder)
        name = sweep or "-".join(runs)
        target = Path(storage.url, runfolder.REPORT) if alone else Path(f"{name[:100]}-{runfolder.REPORT}")
    write_page(target, page(records))
    return target


def read_whole_run(storage: Storage) -> RunData:
    """Read a run folder, and of one on this machine whether it is running. Raises TrainError: no access."""

    run = read_run(storage)
    return replace(run, is_running=is_taken(Path(storage.url))) if isinstance(storage, LocalFolder) else run


def write_page(path: Path, text: str) -> None:
    """Write a file atomically, so that a browser never reads half of it. Raises LaunchError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".report-")
        with open(handle, "w", encoding="utf-8") as file:  # noqa: PTH123 - a file handle
            file.write(text)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)  # noqa: PTH105 - as above
    except OSError as error:
        raise LaunchError(f"{path} can't be written: {error.strerror}", "Name another file: -o FILE") from error
