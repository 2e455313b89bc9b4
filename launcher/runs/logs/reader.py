"""Read a job's output from Cloud Logging, or from the run folder where Cloud Logging is not available."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from launch_train.common.storage import Storage
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UnreachableError
from launcher.gcp.api import status_of
from launcher.jobs.job import Job
from launcher.runs.logs.cloud_logging import CloudLogReader
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.runs.logs.line import Line

__all__ = ["Line", "LogReader"]

NO_ENTRIES_SECONDS: Final = 60.0
"""A VM that has printed for so long without any entry in Cloud Logging probably lacks the permission to write there."""
NO_ENTRIES: Final = """\
no entries of this VM in Cloud Logging; reading the run folder instead
(to write entries, the VM's service account needs roles/logging.logWriter)"""


class LogReader:
    """Read the lines of one job, each once."""

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
        """`say` reports once that Cloud Logging is not available. The lines then come from the run's `folder`, for one
        `attempt` or all of them. `since` (Unix seconds) and `tail` (number of lines) leave out older lines.

        Raises NotAuthorised: no credentials were found.
        """
        self._say, self._folder, self._attempt, self._tail = say, folder, attempt, tail
        self._first_tail, self._clock = tail, clock
        self._log: CloudLogReader | TextLogReader | None = CloudLogReader(job, project, environ, clock)
        if since is not None:
            self._log.start_at(since)
        self._has_lines = False
        self._may_lack_permission = job.zone is not None and since is None and folder is not None
        """A VM writes its own entries and may lack the permission; on Vertex AI the platform writes them."""
        self._first_output_at: float | None = None

    def read_new(self) -> list[Line]:
        """Return the lines since the last call. Raises LaunchError: they can't be read now; the next call has them."""
        if self._log is None:
            return []
        try:
            lines = self._read_tail_once(self._log) if self._tail is not None else self._log.read_new()
        except LaunchError as error:
            self._use_run_folder_after(error)
            return self.read_new()
        self._has_lines = self._has_lines or bool(lines)
        if self._lacks_entries(NO_ENTRIES_SECONDS) and self._folder:
            self._use_run_folder(self._folder)
            return self.read_new()
        return lines

    def read_existing(self) -> Iterator[Line]:
        """Yield all lines written so far; `read_new` continues after them. Raises LaunchError: no answer for a minute,
        or a refusal."""
        if self._log is None:
            return
        try:
            for line in self._read_tail_once(self._log) if self._tail is not None else self._log.read_existing():
                self._has_lines = True
                yield line
        except LaunchError as error:
            self._use_run_folder_after(error)
            yield from self.read_existing()
            return
        if self._lacks_entries(0.0) and self._folder:
            self._use_run_folder(self._folder)
            yield from self.read_existing()

    def _read_tail_once(self, log: CloudLogReader | TextLogReader) -> list[Line]:
        lines = log.read_tail(self._tail or 0)
        self._tail = None
        return lines

    def _use_run_folder_after(self, error: LaunchError) -> None:
        """Switch to the run folder if access to Cloud Logging was refused. Raises any other error."""
        is_refused = not isinstance(error, UnreachableError) and status_of(error) in (403, 404)
        if not is_refused or not isinstance(self._log, CloudLogReader):
            raise error
        text = TextLogReader(self._folder, self._attempt) if self._folder else None
        if text and self._has_lines:
            text.skip_existing()  # shown already, from Cloud Logging
        self._log = text
        self._say(f"{error}\n{'reading the run folder instead' if text else 'log lines are not available'}")

    def _lacks_entries(self, seconds: float) -> bool:
        """Return whether the run folder has had output of the VM for `seconds`, but Cloud Logging has none."""
        log = self._log
        if not self._may_lack_permission or not self._folder or not isinstance(log, CloudLogReader) or log.has_entries:
            self._may_lack_permission = False
            return False
        if self._first_output_at is None:
            with suppress(LaunchError):  # the next poll tries again
                is_empty = TextLogReader(self._folder, self._attempt).is_empty()
                self._first_output_at = None if is_empty else self._clock.now()
        return self._first_output_at is not None and self._clock.now() - self._first_output_at >= seconds

    def _use_run_folder(self, folder: Storage) -> None:
        self._log, self._tail = TextLogReader(folder, self._attempt), self._first_tail
        self._say(NO_ENTRIES)
