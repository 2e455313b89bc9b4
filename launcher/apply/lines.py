"""What a job prints: from Cloud Logging, or where that may not be read from the run folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from launcher.apply.cloudlog import CloudLog
from launcher.apply.googleapis import UnreachableError, status_of
from launcher.apply.printed import Line
from launcher.apply.running import REAL, Clock
from launcher.apply.textlog import TextLog
from launcher.errors import LaunchError
from launcher.jobs import Job
from train.storage import Storage

__all__ = ["Line", "Lines"]


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
        self._log: CloudLog | TextLog | None = CloudLog(job, project, environ, clock)
        if since is not None:
            self._log.start_at(since)
        self._some = False

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
