"""The attempts of a local run in its folder: each one's lock (a create-only object) and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from launch_train import runfolder

if TYPE_CHECKING:
    from launch_train.common.storage import Storage


class End(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an attempt ended: exit code of each replica, duration in seconds, Unix time of the end."""

    exit_codes: dict[str, int]
    seconds: float
    time: float
    stopped: Literal["", "cancelled", "interrupted"] = ""
    """Why it was stopped: by `launch cancel`, or because its launch was interrupted or ended. Empty: it was not."""

    @property
    def succeeded(self) -> bool:
        """Return whether all replicas, at least one, exited with 0 by themselves."""
        return bool(self.exit_codes) and not any(self.exit_codes.values()) and not self.stopped


def state_of(attempt: int, end: End | None, *, is_running: bool, is_cancelled: bool) -> str:
    """Return a run's state by its newest attempt (0: none), in the cloud's words. INTERRUPTED: it was stopped, or its
    supervisor was killed and recorded no end."""
    if is_running:
        return "RUNNING"
    if not attempt:
        return "UNKNOWN"
    if end and not end.stopped:
        return "SUCCEEDED" if end.succeeded else "FAILED"
    return "CANCELLED" if is_cancelled else "INTERRUPTED"


def lock(storage: Storage, facts: Mapping[str, Any]) -> int:
    """Write the next free `attempts/NNNN.json` and return its number (from 1).

    The object is create-only, so concurrent launches get different numbers.
    """
    number = newest_attempt(storage) + 1
    while True:
        body = json.dumps({**facts, "time": time.time()}, sort_keys=True).encode()
        try:
            storage.write(runfolder.attempt_lock(number), body, create=True)
        except FileExistsError:
            number += 1
        else:
            return number


def newest_attempt(storage: Storage) -> int:
    """Return the newest attempt's number; 0: none yet."""
    return max(attempt_numbers(storage), default=0)


def attempt_numbers(storage: Storage) -> list[int]:
    names = storage.list(f"{runfolder.ATTEMPTS}/")
    return sorted({int(lock[1]) for name in names if (lock := runfolder.ATTEMPT_LOCK.match(name))})


def read_facts(storage: Storage, attempt: int) -> Mapping[str, Any]:
    """Return the content of an attempt's lock; empty if it is missing or malformed."""
    try:
        data = json.loads(storage.read(runfolder.attempt_lock(attempt)))
    except (FileNotFoundError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def earlier_python(run_folder: str | None) -> str:
    """Return the Python that ran the newest attempt in a run folder on this machine; empty if none is recorded."""
    if not run_folder or run_folder.startswith("gs://") or not (folder := Path(run_folder)).is_dir():
        return ""
    from launch_train.common.storage import LocalFolder  # Windows lacks what it needs, and shows plans

    storage = LocalFolder(folder)
    return str(read_facts(storage, newest_attempt(storage)).get("python") or "")


def write_end(storage: Storage, attempt: int, end: End) -> None:
    storage.write(runfolder.attempt_end(attempt), msgspec.json.encode(end))


def read_end(storage: Storage, attempt: int) -> End | None:
    """Return how an attempt ended; None: it is running, or its end was not recorded."""
    try:
        return msgspec.json.decode(storage.read(runfolder.attempt_end(attempt)), type=End)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def newest_checkpoint(storage: Storage) -> int | None:
    """Return the newest step with a complete checkpoint, or None."""
    names = storage.list(f"{runfolder.CHECKPOINTS}/")
    return max(runfolder.checkpoint_steps(names), default=None)
