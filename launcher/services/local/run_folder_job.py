"""A run on this machine as a job: its state from a few small files of its folder, as a list may have a thousand runs.

A damaged file gives its run the state UNKNOWN and does not affect the others.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from launch_train import runfolder
from launcher.jobs.job import LOCAL, Failure, Job
from launcher.services.local.attempts import End, state_of
from launcher.services.local.folder_lock import is_taken
from launcher.text import relative

T = TypeVar("T")

HIDDEN: Final = "."
"""Prefix of folders that are not runs, such as a run that is being deleted."""


def is_run_folder(path: Path) -> bool:
    """Return whether a folder has attempts, metrics or a plan."""
    names = (runfolder.ATTEMPTS, runfolder.METRICS, runfolder.PLAN)
    return any(os.path.exists(path / name) for name in names)  # noqa: PTH110 -- Path.exists raises on a name too long


def jobs_below(folder: Path) -> Iterator[Job]:
    """Yield the jobs of the runs in a folder, unsorted; none if the folder does not exist."""
    try:
        paths = [Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith(HIDDEN)]
    except OSError:
        return
    for path in dict.fromkeys(path.resolve() for path in paths if is_run_folder(path)):  # a link is the same run
        if job := read_job(path):
            yield job


def read_job(folder: Path) -> Job | None:
    """Return the job of a run folder; None: it has just been deleted.

    Its times are Unix seconds by this machine's clock: `created` is the start of the first attempt, `started` that of
    the newest one; without attempts, the folder's modification time. Its error says why the folder is unreadable.
    """
    try:
        return job_of(folder)
    except Exception as error:  # noqa: BLE001 - whatever a damaged folder holds, it must not cost the list
        try:
            status = folder.stat()
        except OSError:
            return None
        text = error.strerror if isinstance(error, OSError) else str(error)
        name = f"{Path(str(error.filename)).name}: " if isinstance(error, OSError) and error.filename else ""
        return Job(
            name=str(folder),
            region=LOCAL,
            state="RUNNING" if is_taken(folder) else "UNKNOWN",
            created=status.st_mtime,
            error=Failure(code=0, message=f"unreadable: {name}{text or type(error).__name__}"),
            request={"region": LOCAL, "folder": str(folder), "user": status.st_uid},
            folder=shown(folder),
        )


def job_of(folder: Path) -> Job:
    """Return the job of a run folder. Raises OSError and ValueError: a file is unreadable."""
    names = (f"{runfolder.ATTEMPTS}/{name}" for name in names_in(folder / runfolder.ATTEMPTS))
    numbers = [int(lock[1]) for name in names if (lock := runfolder.ATTEMPT_LOCK.match(name))]
    last = max(numbers, default=0)
    facts = (read_json(folder, runfolder.attempt_lock(last), dict[str, Any]) if last else None) or {}
    first = read_json(folder, runfolder.attempt_lock(min(numbers)), dict[str, Any]) if len(numbers) > 1 else facts
    if last and time_of(facts) is None:
        raise ValueError(f"{runfolder.attempt_lock(last)}: it has no time, so it is not the lock of an attempt")
    status, is_running = folder.stat(), is_taken(folder)  # before the end: it is complete once nothing runs
    end = read_json(folder, runfolder.attempt_end(last), End) if last and not is_running else None
    is_cancelled = (folder / runfolder.attempt_cancel(last)).exists()
    return Job(
        name=str(folder),
        region=LOCAL,
        state=state_of(last, end, is_running=is_running, is_cancelled=is_cancelled),
        created=time_of(first) or status.st_mtime,
        started=time_of(facts),
        ended=end.time if end else None,
        labels={str(name): str(value) for name, value in dict(facts.get("labels") or {}).items()},
        request={**facts, "region": LOCAL, "folder": str(folder), "user": status.st_uid},
        folder=shown(folder),
    )


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


def shown(folder: Path) -> str:
    """Return the path of a run folder relative to the current folder, in a form that cannot be taken for a name."""
    path = relative(str(folder))
    return path if "/" in path else f"./{path}"
