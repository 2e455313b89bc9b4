"""The attempts of a run, in its folder: the lock of each (one create-only object), and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from launch_train.common import contract
from launch_train.common.storage import Storage


class End(Struct, frozen=True, kw_only=True):
    """How an attempt ended: an exit code for each replica, after how many seconds, and when (Unix time)."""

    exit_codes: dict[str, int]
    seconds: float
    time: float

    @property
    def succeeded(self) -> bool:
        """Whether there was a replica, and every one exited 0."""
        return bool(self.exit_codes) and not any(self.exit_codes.values())


def lock(storage: Storage, facts: Mapping[str, Any]) -> int:
    """Write the next free `attempts/NNNN.json` and return its number (from 1).

    Whoever creates the object has the attempt: of ten launches at once each gets a number of its own.
    """
    number = newest(storage) + 1
    while True:
        body = json.dumps({**facts, "time": time.time()}, sort_keys=True).encode()
        try:
            storage.write(contract.attempt_lock(number), body, create=True)
        except FileExistsError:
            number += 1
        else:
            return number


def newest(storage: Storage) -> int:
    """The newest attempt's number, 0 when there is none."""
    names = storage.list(f"{contract.ATTEMPTS}/")
    numbers = [int(stem) for name in names if (stem := name.rpartition("/")[2].removesuffix(".json")).isdigit()]
    return max(numbers, default=0)


def restarts(storage: Storage) -> int:
    """How often the nodes have started the run's processes again within its attempts."""
    names = storage.list(f"{contract.ATTEMPTS}/")
    texts = (storage.read(name).strip() for name in names if name.endswith(".generation"))
    return sum(int(text) for text in texts if text.isdigit())


def facts_of(storage: Storage, attempt: int) -> Mapping[str, Any]:
    """What the lock of an attempt says; empty when it can't be understood."""
    try:
        found = json.loads(storage.read(contract.attempt_lock(attempt)))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_end(storage: Storage, attempt: int, end: End) -> None:
    """Note how an attempt ended."""
    storage.write(contract.attempt_end(attempt), msgspec.json.encode(end))


def read_end(storage: Storage, attempt: int) -> End | None:
    """How an attempt ended; None while it runs, or when nobody was there to note it."""
    try:
        return msgspec.json.decode(storage.read(contract.attempt_end(attempt)), type=End)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def newest_checkpoint(storage: Storage) -> int | None:
    """The newest step that has a complete checkpoint, or None."""
    names = storage.list(f"{contract.CHECKPOINTS}/")
    return max((int(found["step"]) for found in map(contract.MANIFEST.match, names) if found), default=None)
