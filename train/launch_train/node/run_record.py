"""The node's view of the run folder: attempts, generations, and the records that it writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.common.storage import Storage
from launch_train.node.control_store import Timing

T = TypeVar("T")


class DuplicateError(TrainError):
    """Another job has this attempt and does the work: no error."""

    exit = contract.Exit.OK


class UnlockedDuplicateError(DuplicateError):
    """Another job has this attempt, and this one was submitted without a lock: the launcher can't see the claims, and
    must not take this job's end for the run's."""

    exit = contract.Exit.SUPERSEDED


@dataclass(frozen=True)
class RunRecord:
    """The run folder as the node sees it. A run without one has a folder in memory."""

    storage: Storage

    def within(self, seconds: float) -> RunRecord:
        """Return the record with a time limit for each call."""
        return RunRecord(self.storage.within(seconds))

    def terminal(self) -> str | None:
        """Return why the run must not be started again, or None."""
        text = self._read(runfolder.TERMINAL)
        return None if text is None else text.strip() or "no reason given"

    def take(self, job: str | None, ended: Collection[str] | None = None) -> int:
        """Claim an attempt for `job`, and return its number.

        It is the newest, unless the job has claimed one before (a restarted container, another node). Without a job id
        jobs can't be distinguished: nothing is written. `ended` (contract.ENDED) are jobs whose attempt is followed by
        the next.

        Raises DuplicateError if another job has it, and SupersededError if another one has claimed a later attempt.
        """
        names = self.storage.list(f"{runfolder.ATTEMPTS}/")
        if text := runfolder.closed_text(self.storage, names):
            raise SupersededError(text)
        newest = max(_numbers(runfolder.ATTEMPT_LOCK, names), default=1)
        if not job:
            return newest
        for attempt in sorted(_numbers(runfolder.CLAIM, names), reverse=True):
            if self._holder(attempt) == job:
                return self._check_not_superseded(attempt, names)
        if ended is not None:
            newest = max([newest, *_numbers(runfolder.CLAIM, names)])
            newest += self._holder(newest) in ended
        try:
            # The content is unique to the job: its other nodes write the same, and recognise the claim as theirs.
            self.storage.write(runfolder.claim(newest), json.dumps({"job": job}).encode(), create=True)
        except FileExistsError as error:
            if (holder := self._holder(newest)) != job:
                kind = DuplicateError if ended is None else UnlockedDuplicateError
                raise kind(f"job {holder} already runs attempt {newest} of this run; exiting") from error
        return newest

    def _check_not_superseded(self, attempt: int, names: list[str]) -> int:
        if later := [number for number in _numbers(runfolder.CLAIM, names) if number > attempt]:
            raise SupersededError(f"job {self._holder(max(later))} has taken over with attempt {max(later)}")
        return attempt

    def _holder(self, attempt: int) -> str:
        """Return the job id in a claim; empty if it can't be parsed."""
        try:
            claim = json.loads(self._read(runfolder.claim(attempt)) or "")
        except ValueError:
            return ""
        return str(claim.get("job", "")) if isinstance(claim, dict) else ""

    def next_generation(self, attempt: int) -> int:
        """Return the number after the attempt's newest generation, whichever container started that; from 0."""
        text = (self._read(runfolder.generation_record(attempt)) or "").strip()
        return int(text) + 1 if text.isdecimal() else 0

    def newest_checkpoint(self) -> int:
        """Return the newest step with a complete checkpoint; 0 for none.

        Only the step counts: processes that fail each time after saving the same step make no progress.
        """
        names = self.storage.list(f"{runfolder.CHECKPOINTS}/")
        return max(runfolder.checkpoint_steps(names), default=0)

    def has_steps(self, attempt: int, generation: int) -> bool:
        """Return whether this generation has a row of any step. It reads all parts, so call it for short
        generations."""
        prefix = runfolder.metrics_part(attempt, generation, 0, 0).rsplit("-", 2)[0]
        texts = ((self._read(part) or "").encode() for part in self.storage.list(f"{prefix}-"))
        return any("event" not in row for text in texts for row in runfolder.records(text))

    def write(self, name: str, content: bytes | str) -> None:
        """Write a file of the run folder (launch_train.runfolder)."""
        self.storage.write(name, content.encode() if isinstance(content, str) else content)

    def _read(self, name: str) -> str | None:
        try:
            return self.storage.read(name).decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{name} in the run folder can't be read: {error.strerror or error}") from error


def ended_jobs(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the ended jobs (contract.ENDED); None if the request doesn't list them, or not readably."""
    try:
        jobs = json.loads(environ.get(contract.ENDED, ""))
    except ValueError:
        return None
    return frozenset(map(str, jobs)) if isinstance(jobs, list) else None


def _numbers(pattern: re.Pattern[str], names: list[str]) -> list[int]:
    return [int(match[1]) for match in map(pattern.match, names) if match]


def retry_until(
    ask: Callable[[], T],
    errors: tuple[type[Exception], ...],
    timing: Timing,
    say: Callable[[str], None],
    pause: Callable[[float], None],
) -> T:
    """Return the result of `ask`, retried while it raises one of `errors`: an outage of the run folder must not end a
    paid run. `pause` waits so many seconds, or raises.

    Raises the last error after `timing.retry` seconds.
    """
    start, reported = time.monotonic(), float("-inf")
    while True:
        try:
            return ask()
        except errors as error:
            now = time.monotonic()
            if now - start >= timing.retry:
                raise
            if now - reported >= timing.line:
                reported = now
                say(f"{error}; retrying for {timing.retry - (now - start):.0f} s")
        pause(timing.retry_every)
