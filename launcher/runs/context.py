"""Where a run is: the service that has its jobs, the clock, and how its attempts and its output are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import launcher.clock
from launch_train.common.storage import Storage
from launcher.clock import Clock
from launcher.gcp.storage import open_folder, use_errors
from launcher.jobs.job import LOCAL, Job
from launcher.runs.attempts import AttemptEnd, AttemptEntry
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.runs.logs.line import Line
from launcher.services.base import Jobs, Listing, Service
from launcher.services.local.attempts import attempt_numbers, newest_attempt, read_end, read_facts
from launcher.services.local.run_folder_job import time_of
from launcher.services.local.service import ThisMachine

ENGINE: Final = "Compute Engine"
"""Stands for all zones among the regions that could not be read."""


class LineReader(Protocol):
    """Reads the lines of a job's output, each once. Raises LaunchError: they can't be read now."""

    def read_existing(self) -> Iterator[Line]:
        """Yield all lines written so far."""

    def read_new(self) -> list[Line]:
        """Return the lines since the last call."""


class RunContext(Protocol):
    """Where runs are: in a project of Google Cloud, or on this machine."""

    @property
    def project(self) -> str:
        """Return the project id; `local` on this machine."""

    @property
    def clock(self) -> Clock:
        """Return the clock of watches and waits."""

    def with_notice(self, say: Callable[[str], None]) -> RunContext:
        """Return this place with another receiver of messages, such as a region that could not be read."""

    def of_run(self, folder: Storage | None) -> Jobs:
        """Return the service that has the jobs of a run with this folder."""

    def attempts(self, folder: Storage) -> tuple[AttemptEntry, ...]:
        """Return the attempts of a run, in order. Raises LaunchError: its folder can't be read."""

    def open_log(
        self, job: Job, folder: Storage | None, say: Callable[[str], None], *, attempt: int = 0, tail: int | None = None
    ) -> LineReader:
        """Return the reader of a job's output, of one attempt (0: unknown), from its last `tail` lines on. Raises
        LaunchError."""


class LaunchContext(RunContext, Protocol):
    """A place for jobs that outlive launch: a project of Google Cloud, or a host."""

    def of_run(self, folder: Storage | None) -> Service:
        """Return the service that has the jobs of a run with this folder."""

    def find_jobs(self, filter_: str, regions: Sequence[str], *, all_vms: bool = False) -> Listing:
        """Return the jobs that match a filter of labels, newest first, in these regions; on a host, all of its jobs.
        Raises LaunchError: none could be read."""


class LocalContext:
    """This machine."""

    project: str = LOCAL

    def __init__(self) -> None:
        self.clock = launcher.clock.REAL
        self._service = ThisMachine()

    def with_notice(self, say: Callable[[str], None]) -> LocalContext:
        """Return this machine, which has no messages."""
        return self

    def of_run(self, folder: Storage | None) -> ThisMachine:
        return self._service

    def attempts(self, folder: Storage) -> tuple[AttemptEntry, ...]:
        """Return the attempts by their locks and ends. Raises LaunchError."""
        with use_errors():
            return tuple(local_attempt(folder, number) for number in attempt_numbers(folder))

    def open_log(
        self, job: Job, folder: Storage | None, say: Callable[[str], None], *, attempt: int = 0, tail: int | None = None
    ) -> LineReader:
        """Return the reader of the output in the run folder, by default of the newest attempt. Raises LaunchError."""
        storage = folder or open_folder(job.name)
        with use_errors():
            return TextLogReader(storage, attempt or newest_attempt(storage) or None, tail=tail)


CAUSES = {
    "SUCCEEDED": "done",
    "FAILED": "it could not be started",
    "CANCELLED": "it was cancelled",
    "INTERRUPTED": "it was interrupted",
}


def local_attempt(folder: Storage, number: int) -> AttemptEntry:
    """Return an attempt on this machine. Raises OutputError: its lock or its end can't be read."""
    facts: Any = read_facts(folder, number)
    end = read_end(folder, number)
    failed = [f"{name} exited with {code}" for name, code in end.exit_codes.items() if code] if end else []
    state = "SUCCEEDED" if end and end.succeeded else "FAILED"
    if end and not end.succeeded and end.stopped:
        state = "CANCELLED" if end.stopped == "cancelled" else "INTERRUPTED"
    return AttemptEntry(
        number=number,
        round=0,
        region=LOCAL,
        zone=None,
        provisioning=facts.get("provisioning"),
        machine=facts.get("machine"),
        identity="",
        spec=str(facts.get("spec") or ""),
        writer="",
        time=time_of(facts) or 0.0,
        job=folder.url,
        end=AttemptEnd(
            scope="permanent",
            kind="succeeded" if state == "SUCCEEDED" else "user" if state == "FAILED" else "cancelled",
            cause=", ".join(failed) or CAUSES[state],
            state=state,
            time=end.time,
            billed=end.seconds,
        )
        if end
        else None,
        exit_codes=end.exit_codes if end else None,
    )
