"""This machine as a service: the job of a run is its folder, which its `launch local` has locked while it runs.

A run is cancelled through a file in its folder, which makes its `launch local` stop the processes. No signal is sent
from here: a recorded process ID may belong to another process by now, and the run may be on another machine that
shares the disk.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launcher.gcp.storage import use_errors
from launcher.jobs.job import LOCAL, Job
from launcher.services.base import GoneError
from launcher.services.local.attempts import newest_attempt
from launcher.services.local.run_folder_job import read_job


class ThisMachine:
    """The jobs on this machine. Their names are the paths of their run folders."""

    project: str = LOCAL
    outlives_client = False
    poll_seconds: float | None = 2.0
    """Only files are read."""
    stop_seconds = 60.0
    """The processes get 30 s to save (services.local.supervisor)."""
    stuck_fix = "Press Ctrl-C where launch local runs it."

    def __init__(self) -> None:
        self._cancelled: set[str] = set()

    def get(self, name: str) -> Job:
        """Return a job's state. Raises GoneError; UsageError: a cancelled run's folder can't be written."""
        job = read_job(Path(name))
        if job is None:
            raise GoneError(f"{name} does not exist")
        if not job.is_over and name in self._cancelled:  # an attempt that has just begun may not have had its number
            request_cancel(LocalFolder(Path(name)))
        return job

    def cancel(self, name: str) -> None:
        """Begin to cancel a job. Raises GoneError; UsageError: its folder can't be written."""
        if not Path(name).is_dir():
            raise GoneError(f"{name} does not exist")
        request_cancel(LocalFolder(Path(name)))
        self._cancelled.add(name)

    def release(self, job: Job) -> None:
        """Do nothing: an ended run has no processes."""

    def forget(self, job: Job) -> None:
        """Do nothing: the folder is the only record."""


def request_cancel(storage: Storage) -> None:
    """Write the request to cancel the newest attempt. Raises UsageError: the folder can't be written."""
    with use_errors(), suppress(FileExistsError):
        if number := newest_attempt(storage):
            storage.write(runfolder.attempt_cancel(number), b"launch cancel\n", create=True)


def is_attempt_cancelled(folder: Path) -> bool:
    """Return whether `launch cancel` stopped the newest attempt of a run folder. Raises UsageError: unreadable."""
    with use_errors():
        return (folder / runfolder.attempt_cancel(newest_attempt(LocalFolder(folder)))).exists()
