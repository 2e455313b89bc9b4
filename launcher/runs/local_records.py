"""Read the state of runs on this machine from a few small files of each run folder: a list may have a thousand runs.

Standard library and msgspec only, and no metrics file is read whole. A damaged file gives its run a `problem` and does
not affect the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from launch_train.common import contract
from launcher.runs.find_local_run import HIDDEN, LocalRun, is_run_folder
from launcher.runs.metrics.progress import Progress, logged_steps, summarize_rows
from launcher.services.local.attempts import End, state_of
from launcher.services.local.folder_lock import is_taken

T = TypeVar("T")

TAIL_BYTES: Final = 16_384
"""Bytes read from the end of a part of the metrics, where its newest row is."""
HEAD_BYTES: Final = 16_384
"""Bytes read from the beginning of a start's first part: the `start` event has the number of steps."""
PARTS: Final = 3
"""Number of newest parts that are searched for a row: the last one may contain only events."""


class SpecLabels(Struct, frozen=True):
    """The labels of a spec."""

    labels: Mapping[str, Any] = {}


class PlanLabels(Struct, frozen=True):
    """The part of a plan that has the labels."""

    spec: SpecLabels = SpecLabels()


class LocalRecord(Struct, frozen=True, kw_only=True):
    """The state of a run folder on this machine. Times are Unix seconds by this machine's clock; None: unknown."""

    folder: Path
    state: str
    """RUNNING, SUCCEEDED, FAILED, CANCELLED, INTERRUPTED or UNKNOWN."""
    attempts: int = 0
    created: float | None = None
    """Start of the first attempt."""
    started: float | None = None
    """Start of the newest attempt; without attempts, the folder's modification time."""
    end: End | None = None
    """How the newest attempt ended; None: it is running, or its end was not recorded."""
    facts: Mapping[str, Any] = {}
    """The content of the newest attempt's lock."""
    labels: Mapping[str, str] = {}
    progress: Progress | None = None
    user: int = -1
    """The folder owner's user ID (uid)."""
    problem: str = ""
    """Why the folder could not be read completely."""

    @property
    def id(self) -> str:
        """Return the run's ID: the folder's name."""
        return self.folder.name


def read_records(folder: Path) -> tuple[LocalRecord, ...]:
    """Return the runs in a folder, unsorted; none if the folder does not exist."""
    try:
        paths = [Path(one.path) for one in os.scandir(folder) if not one.name.startswith(HIDDEN)]
    except OSError:
        return ()
    found = dict.fromkeys(path.resolve() for path in paths if is_run_folder(path))  # a link to a run is the same run
    return tuple(record for path in found if (record := read_record(path)))


def read_record(folder: Path) -> LocalRecord | None:
    """Return the state of a run, with a `problem` if its folder is unreadable; None: it has just been deleted."""
    try:
        return read_files(folder)
    except Exception as error:  # noqa: BLE001 - whatever a damaged folder holds, it must not cost the list
        try:
            status = folder.stat()
        except OSError:
            return None
        text = error.strerror if isinstance(error, OSError) else str(error)
        name = f"{Path(str(error.filename)).name}: " if isinstance(error, OSError) and error.filename else ""
        return LocalRecord(
            folder=folder,
            state="UNKNOWN",
            started=status.st_mtime,
            user=status.st_uid,
            problem=f"unreadable: {name}{text or type(error).__name__}",
        )


def last_start(run: LocalRun) -> float:
    """Return when the newest attempt of a run started, in Unix seconds; 0: unknown."""
    record = read_record(run.folder)
    return record.started or 0.0 if record else 0.0


def read_files(folder: Path) -> LocalRecord:
    """Return the state of a run. Raises OSError and ValueError: a file is unreadable."""
    names = (f"{contract.ATTEMPTS}/{name}" for name in names_in(folder / contract.ATTEMPTS))
    numbers = [int(lock[1]) for name in names if (lock := contract.ATTEMPT_LOCK.match(name))]
    last = max(numbers, default=0)
    facts = read_json(folder, contract.attempt_lock(last), dict[str, Any]) if last else {}
    first = read_json(folder, contract.attempt_lock(min(numbers)), dict[str, Any]) if len(numbers) > 1 else facts
    end = read_json(folder, contract.attempt_end(last), End) if last else None
    if last and time_of(facts) is None:
        raise ValueError(f"{contract.attempt_lock(last)}: it has no time, so it is not the lock of an attempt")
    status, is_running = folder.stat(), is_taken(folder)
    is_cancelled = (folder / contract.attempt_cancel(last)).exists()
    return LocalRecord(
        folder=folder,
        state=state_of(last, end, is_running=is_running, is_cancelled=is_cancelled),
        attempts=last,
        created=time_of(first),
        started=time_of(facts) if last else status.st_mtime,
        end=None if is_running else end,
        facts=facts or {},
        labels=labels_of(folder, facts or {}),
        progress=read_progress(folder),
        user=status.st_uid,
    )


def labels_of(folder: Path, facts: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the labels of the newest attempt; older launches recorded those of the spec alone, in the plan."""
    found = facts.get("labels")
    if found is None:
        plan = read_json(folder, contract.PLAN, PlanLabels)
        found = plan.spec.labels if plan else {}
    return {str(name): str(value) for name, value in dict(found).items()}


def read_progress(folder: Path) -> Progress | None:
    """Return the progress according to the newest row; None: no row yet."""
    names = sorted(names_in(folder / contract.METRICS))  # zero-padded numbers, in the order of writing
    parts = ((found, name) for name in reversed(names) if (found := contract.PART.match(f"{contract.METRICS}/{name}")))
    for found, name in islice(parts, PARTS):
        newest = (
            one for line in reversed(last_lines(folder / contract.METRICS / name)) for one in contract.records(line)
        )
        if row := next((one for one in newest if "event" not in one and type(one.get("step")) is int), None):
            first = next(other for other in names if other.startswith(f"{found[1]}-{found[2]}-"))
            with (folder / contract.METRICS / first).open("rb") as file:
                starts = contract.records(file.read(HEAD_BYTES))
            counts = (logged_steps(one) for one in starts if one.get("event") == "start")
            return summarize_rows((row,), next(filter(None, counts), None), None)
    return None


def last_lines(path: Path) -> list[bytes]:
    """Return the complete lines in the last TAIL_BYTES of a file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read()
    return (text if size <= TAIL_BYTES else text.partition(b"\n")[2]).splitlines()


def names_in(folder: Path) -> list[str]:
    """Return the file names in a folder; none if it does not exist."""
    try:
        return os.listdir(folder)  # noqa: PTH208 -- names alone, of tens of thousands of parts
    except FileNotFoundError:
        return []


def read_json(folder: Path, name: str, kind: type[T]) -> T | None:
    """Return a file's content; None if it does not exist. Raises ValueError: it is malformed; OSError."""
    try:
        return msgspec.json.decode((folder / name).read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{name}: {error}") from error


def time_of(facts: Mapping[str, Any] | None) -> float | None:
    """Return the start of an attempt in Unix seconds; None if its lock has no valid time."""
    value = (facts or {}).get("time")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
