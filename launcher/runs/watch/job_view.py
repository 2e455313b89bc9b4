"""The view by which a watch polls a run's job: its state, its log lines and its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from launcher.jobs.job import Job
from launcher.runs.metrics.progress import LIST_INTERVAL, ProgressReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from launch_train.common.storage import Storage
    from launch_train.runfolder.starts import Record
    from launcher.runs.context import RunContext
    from launcher.runs.logs.line import Line
    from launcher.runs.metrics.progress import Progress

LOCAL_LIST_SECONDS: Final = 5.0
"""Interval between two listings of the metrics where they are files on this machine."""


class RunJobView:
    """The JobView of one job. `number` is that of its attempt, 0 if unknown."""

    def __init__(
        self,
        context: RunContext,
        job: Job,
        number: int,
        folder: Storage | None,
        say: Callable[[str], None],
        *,
        tail: int | None = None,
    ) -> None:
        """`tail`: number of lines to begin with; None: all."""
        self._service, self._name = context.of_run(folder), job.name
        self._lines = context.open_log(job, folder, say, attempt=number, tail=tail)
        interval = LIST_INTERVAL if self._service.poll_seconds is None else LOCAL_LIST_SECONDS
        self._progress = (
            ProgressReader(folder, job, attempt=number or 1, clock=context.clock, list_interval=interval)
            if folder
            else None
        )

    @property
    def newest_rows(self) -> tuple[Record, ...]:
        """Return the newest rows of metrics, oldest first."""
        return self._progress.newest_rows if self._progress else ()

    def job(self) -> Job:
        """Return the job's current state."""
        return self._service.get(self._name)

    def lines(self) -> list[Line]:
        """Return the new log lines."""
        return self._lines.read_new()

    def progress(self) -> Progress | None:
        """Return the newest progress, or None."""
        return self._progress.read_new() if self._progress else None
