"""A view of a run on this machine: its state, output and progress, from its folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from launch_train.common import contract
from launcher.gcp.storage import open_folder, use_errors
from launcher.jobs.job import Failure, Job
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.runs.metrics.progress import ProgressReader
from launcher.services.local.attempts import newest_attempt, read_end, read_facts
from launcher.services.local.folder_lock import is_taken

if TYPE_CHECKING:
    from launcher.clock import Clock
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.metrics.results import Record
    from launcher.runs.watch.loop import Line, Progress

GONE: Final = "the process of launch local no longer exists"
LIST_SECONDS: Final = 5.0
"""Interval between two listings of the metrics; short, as they are files on this machine."""


class LocalRunView:
    """The JobView of a run on this machine. `tail`: number of lines to begin with."""

    def __init__(self, run: LocalRun, clock: Clock, *, tail: int) -> None:
        self._run = run
        self._storage = open_folder(str(run.folder))
        self._lines, self._tail = TextLogReader(self._storage), tail
        self._progress = ProgressReader(self._storage, clock=clock, list_interval=LIST_SECONDS)

    @property
    def newest_rows(self) -> tuple[Record, ...]:
        """Return the newest rows of metrics, oldest first."""
        return self._progress.newest_rows

    @property
    def attempt(self) -> int:
        """Return the number of the newest attempt; 0: none yet. Raises LaunchError."""
        with use_errors():
            return newest_attempt(self._storage)

    def job(self) -> Job:
        """Return the state as that of a job: RUNNING, SUCCEEDED, FAILED, or CANCELLED, also if its process is gone."""
        is_running = is_taken(self._run.folder)  # before its records: they are complete once it is not
        number = self.attempt
        with use_errors():
            created = read_facts(self._storage, number).get("time")
            end = None if is_running else read_end(self._storage, number)
        is_cancelled = end is None or (self._run.folder / contract.attempt_cancel(number)).exists()
        state = "RUNNING" if is_running else "CANCELLED" if is_cancelled else "FAILED"
        if end and end.succeeded:
            state = "SUCCEEDED"
        begun = float(created) if isinstance(created, int | float) else 0.0
        ended = None if is_running else end.time if end else time.time()
        gone = None if is_running or end else Failure(code=0, message=GONE)
        return Job(
            name=self._run.id, region="local", state=state, created=begun, started=begun, ended=ended, error=gone
        )

    def lines(self) -> list[Line]:
        """Return the new lines of output; at first the last ones."""
        tail, self._tail = self._tail, 0
        return self._lines.read_tail(tail) if tail else self._lines.read_new()

    def progress(self) -> Progress | None:
        """Return the newest progress, or None."""
        return self._progress.read_new()
