"""What a job prints: from Cloud Logging, or where that may not be read from the run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from launch_train.common.storage import Storage
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.gcp.api import UnreachableError, status_of
from launcher.jobs.job import Job
from launcher.runs.logs.cloud_logging import CloudLog
from launcher.runs.logs.line import Line
from launcher.runs.logs.run_folder import TextLog

__all__ = ["Line", "Lines"]

SILENT_SECONDS: Final = 60.0
"""A VM that has printed for so long, and has nothing in Cloud Logging, may not write there."""
SILENT: Final = """\
nothing of this VM is in Cloud Logging; its lines come from the run folder instead
(its service account writes there with roles/logging.logWriter)"""


class Lines:
    """The lines of one job, each once."""

    def __init__(
        self,
        job: Job,
        project: str,
        environ: Mapping[str, str],
        *,
        say: Callable[[str], None],
        folder: Storage | None = None,
        attempt: int | None = None,
        clock: Clock = REAL,
        since: float | None = None,
        tail: int | None = None,
    ) -> None:
        """`say` is told once when Cloud Logging may not be read; then the lines come from the run's `folder`, of one
        `attempt` or of all. `since` (Unix seconds) and `tail` (so many of the last lines) leave out what is older.

        Raises NotAuthorised: there are no credentials.
        """
        self._say, self._folder, self._attempt, self._tail = say, folder, attempt, tail
        self._first_tail, self._clock = tail, clock
        self._log: CloudLog | TextLog | None = CloudLog(job, project, environ, clock)
        if since is not None:
            self._log.start_at(since)
        self._some = False
        self._doubts = job.zone is not None and since is None and folder is not None
        """Whether Cloud Logging may have nothing because the VM may not write there. On Vertex AI the platform does."""
        self._printed: float | None = None

    def new(self) -> list[Line]:
        """The lines that are new. Raises LaunchError: they can't be read (now); nothing is lost by that."""
        if self._log is None:
            return []
        try:
            lines = self._first(self._log) if self._tail is not None else self._log.new()
        except LaunchError as error:
            self._turn(error)
            return self.new()
        self._some = self._some or bool(lines)
        if self._is_silent(SILENT_SECONDS) and self._folder:
            self._turn_from_silence(self._folder)
            return self.new()
        return lines

    def past(self) -> Iterator[Line]:
        """All lines that are there; `new` goes on after them. Raises LaunchError: no answer for a minute, or a
        refusal."""
        if self._log is None:
            return
        try:
            for line in self._first(self._log) if self._tail is not None else self._log.past():
                self._some = True
                yield line
        except LaunchError as error:
            self._turn(error)
            yield from self.past()
            return
        if self._is_silent(0.0) and self._folder:
            self._turn_from_silence(self._folder)
            yield from self.past()

    def _first(self, log: CloudLog | TextLog) -> list[Line]:
        """The last lines, once."""
        lines = log.tail(self._tail or 0)
        self._tail = None
        return lines

    def _turn(self, error: LaunchError) -> None:
        """To the run folder, if Cloud Logging is closed to us. Raises the error if that isn't it."""
        if isinstance(error, UnreachableError) or status_of(error) not in (403, 404) or not self._in_the_cloud:
            raise error
        text = TextLog(self._folder, self._attempt) if self._folder else None
        if text and self._some:
            text.skip()  # what is there has been shown
        self._log = text
        other = "its lines come from the run folder instead" if text else "its lines can't be shown"
        self._say(f"{error}\n{other}")

    @property
    def _in_the_cloud(self) -> bool:
        return isinstance(self._log, CloudLog)

    def _is_silent(self, seconds: float) -> bool:
        """Whether a VM has printed for `seconds`, as its run folder shows, and Cloud Logging has nothing of it."""
        if not self._doubts or not self._folder or not isinstance(self._log, CloudLog) or self._log.has_some:
            self._doubts = False
            return False
        if self._printed is None:
            with suppress(LaunchError):  # it can't be read now; the next look sees it
                self._printed = None if TextLog(self._folder, self._attempt).is_empty() else self._clock.now()
        return self._printed is not None and self._clock.now() - self._printed >= seconds

    def _turn_from_silence(self, folder: Storage) -> None:
        self._log, self._tail = TextLog(folder, self._attempt), self._first_tail
        self._say(SILENT)
