"""A view of one job: its state, log lines (Cloud Logging or the run folder) and progress."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.jobs.job import Job
from launcher.runs.logs.reader import LogReader
from launcher.runs.metrics.progress import ProgressReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from launch_train.common.storage import Storage
    from launcher.runs.cloud import CloudContext
    from launcher.runs.metrics.results import Record
    from launcher.runs.watch.loop import Line, Progress
    from launcher.services.router import Services


class CloudJobView:
    """The JobView of one job. `number` is that of its attempt, 0 if unknown."""

    def __init__(
        self,
        service: Services,
        cloud: CloudContext,
        job: Job,
        number: int,
        folder: Storage | None,
        say: Callable[[str], None],
        *,
        tail: int | None = None,
    ) -> None:
        """`tail`: number of lines to begin with; None: all."""
        self._service = service
        self._name = job.name
        clock = cloud.clock
        self._lines = LogReader(
            job, cloud.project, os.environ, say=say, folder=folder, attempt=number or None, clock=clock, tail=tail
        )
        self._progress = ProgressReader(folder, job, attempt=number or 1, clock=clock) if folder else None

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
