"""What the node reads from the run folder, and the little that it writes there."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launch_train.common import contract
from launch_train.common.errors import OutputError, SupersededError, TrainError
from launch_train.common.storage import Storage

_LOCK = re.compile(rf"^{contract.ATTEMPTS}/(\d{{4,}})\.json$")
_CLAIM = re.compile(rf"^{contract.ATTEMPTS}/(\d{{4,}})\.claim$")


class DuplicateError(TrainError):
    """Another job has this attempt. Nothing is wrong: it does the work."""

    exit = contract.Exit.OK


class UnlockedError(DuplicateError):
    """The same for a job that was launched without a lock: who launched it can't see the claims, and must not take its
    end for the run's."""

    exit = contract.Exit.SUPERSEDED


@dataclass(frozen=True)
class Record:
    """The run folder as the node sees it. Without storage it is empty, and what is written is dropped."""

    storage: Storage | None

    def within(self, seconds: float) -> Record:
        """The same, where each call gives up after so many seconds."""
        return Record(self.storage.within(seconds) if self.storage else None)

    def terminal(self) -> str | None:
        """Why the run must not be started again, or None."""
        text = self._read(contract.TERMINAL)
        return None if text is None else text.strip() or "no reason given"

    def take(self, job: str | None, ended: Collection[str] | None = None) -> int:
        """Claim an attempt for `job`, and its number: the newest, unless the job has claimed one before (a container
        that was started again, another node). Without a job id nobody is told apart: nothing is written. `ended`
        (contract.ENDED) are jobs that make way, whose attempt is followed by the next.

        Raises DuplicateError when another job has it, and SupersededError when another has claimed a later one.
        """
        names = self.storage.list(f"{contract.ATTEMPTS}/") if self.storage else []
        newest = max(_numbers(_LOCK, names), default=1)
        if not self.storage or not job:
            return newest
        for attempt in sorted(_numbers(_CLAIM, names), reverse=True):
            if self._holder(attempt) == job:
                return self._own(attempt, names)
        if ended is not None:
            newest = max([newest, *_numbers(_CLAIM, names)])
            newest += self._holder(newest) in ended
        try:
            # Content that is unique to the job: the other nodes write the same, and take it for their own.
            self.storage.write(contract.claim(newest), json.dumps({"job": job}).encode(), create=True)
        except FileExistsError as error:
            if (holder := self._holder(newest)) != job:
                kind = DuplicateError if ended is None else UnlockedError
                raise kind(f"job {holder} has attempt {newest} of this run; this one has none") from error
        return newest

    def _own(self, attempt: int, names: list[str]) -> int:
        if later := [number for number in _numbers(_CLAIM, names) if number > attempt]:
            raise SupersededError(f"job {self._holder(max(later))} has taken over with attempt {max(later)}")
        return attempt

    def _holder(self, attempt: int) -> str:
        """The job id in a claim; empty if none can be found in it."""
        try:
            held = json.loads(self._read(contract.claim(attempt)) or "")
        except ValueError:
            return ""
        return str(held.get("job", "")) if isinstance(held, dict) else ""

    def next_generation(self, attempt: int) -> int:
        """The number after the newest generation of the attempt, whichever container started that; from 0."""
        text = (self._read(contract.generation_record(attempt)) or "").strip()
        return int(text) + 1 if text.isdecimal() else 0

    def newest_checkpoint(self) -> int:
        """The newest step that has a whole checkpoint; 0 for none.

        The step alone: processes that die each time after they wrote the same step again have got no further.
        """
        names = self.storage.list(f"{contract.CHECKPOINTS}/") if self.storage else []
        return max((int(found["step"]) for found in map(contract.MANIFEST.match, names) if found), default=0)

    def has_steps(self, attempt: int, generation: int) -> bool:
        """Whether a row of any step of this generation has come; every part of it is read, so ask of short ones."""
        begin = contract.metrics_part(attempt, generation, 0, 0).rsplit("-", 2)[0]
        parts = self.storage.list(f"{begin}-") if self.storage else []
        rows = (json.loads(line) for part in parts for line in (self._read(part) or "").splitlines())
        return any("event" not in row for row in rows)

    def write_terminal(self, reason: str) -> None:
        """Forbid every further start of the run."""
        self._write(contract.TERMINAL, f"{reason}\n")

    def write_generation(self, attempt: int, generation: int) -> None:
        """Note that a generation starts."""
        self._write(contract.generation_record(attempt), f"{generation}\n")

    def write_node(self, node: int, facts: Mapping[str, Any]) -> None:
        """Note what this node is. It is also the proof that the folder can be written."""
        self._write(contract.node_record(node), json.dumps(facts) + "\n")

    def write_bench(self, node: int, report: bytes) -> None:
        """Note what this node's GPUs gave (train/launch_train/bench/report.py)."""
        self._write(contract.node_bench(node), report.decode())

    def write_stacks(self, name: str, stacks: bytes) -> None:
        """Keep the stacks of processes that hung (contract.stacks)."""
        self._write(name, stacks.decode(errors="replace"))

    def _read(self, name: str) -> str | None:
        try:
            return self.storage.read(name).decode() if self.storage else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(f"{name} in the run folder can't be read: {error.strerror or error}") from error

    def _write(self, name: str, text: str) -> None:
        if self.storage:
            self.storage.write(name, text.encode())


def ended_jobs(environ: Mapping[str, str]) -> frozenset[str] | None:
    """The jobs that make way (contract.ENDED); None where the request says nothing of them that can be read."""
    try:
        found = json.loads(environ.get(contract.ENDED, ""))
    except ValueError:
        return None
    return frozenset(map(str, found)) if isinstance(found, list) else None


def _numbers(pattern: re.Pattern[str], names: list[str]) -> list[int]:
    return [int(found[1]) for found in map(pattern.match, names) if found]
