"""Checkpoint lease: the one start that may write, by compare-and-swap on `checkpoints/LATEST`.

A start takes the pointer over before it reads anything, and moves it with each checkpoint. An older start that is still
alive (a machine that was cut off, a second launch) finds it changed at its next checkpoint, and exits.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import SupersededError
from launch_train.common.storage import Storage

TRIES = 10
"""Attempts to take over while others do the same."""


class Lease:
    """The right of one start to write checkpoints. `start` is its name; names of later starts sort after it."""

    def __init__(self, storage: Storage, start: str) -> None:
        """Take over the pointer. Raises SupersededError if this or a later start has it."""
        self.start = start
        self._storage = storage
        self._nonce = uuid.uuid4().hex
        self._pointer: Mapping[str, Any] = {}
        self._version = self._take()

    def check(self, storage: Storage | None = None) -> None:
        """Raise SupersededError if another start has taken over. `storage` is the same folder, perhaps with a shorter
        time limit."""
        pointer, version = read(storage or self._storage)
        if pointer.get("nonce") != self._nonce:
            raise _superseded(pointer, self.start)
        # Ours in any case: a swap may have succeeded although its answer was lost.
        self._pointer, self._version = pointer, version

    def advance(self, step: int, manifest: str, storage: Storage | None = None) -> None:
        """Move the pointer to a new checkpoint. Raises SupersededError if another start has taken over."""
        folder = storage or self._storage
        for _ in range(TRIES):
            content = {**self._pointer, "step": step, "manifest": manifest}
            try:
                self._version = folder.swap(runfolder.LATEST, json.dumps(content).encode(), self._version)
            except FileExistsError:
                self.check(folder)
            else:
                self._pointer = content
                return
        raise _superseded(read(folder)[0], self.start)

    def _take(self) -> str:
        for _ in range(TRIES):
            pointer, version = read(self._storage)
            if pointer.get("start", "") >= self.start:
                raise _superseded(pointer, self.start)
            self._pointer = {**pointer, "start": self.start, "nonce": self._nonce}
            with suppress(FileExistsError):
                return self._storage.swap(runfolder.LATEST, json.dumps(self._pointer).encode(), version)
        raise _superseded(read(self._storage)[0], self.start)


def acquire(storage: Storage, env: Mapping[str, str]) -> Lease:
    """Acquire the lease for the start that the node has numbered in `env`; without a node, for the one after the last.

    Raises SupersededError if this or a later start has it.
    """
    attempt, generation = env.get(contract.ATTEMPT), env.get(contract.GENERATION)
    if attempt and generation:
        return Lease(storage, runfolder.start_name(int(attempt), int(generation)))
    last_attempt, _, last_generation = read(storage)[0].get("start", "0001-0000").partition("-")
    return Lease(storage, runfolder.start_name(int(last_attempt), int(last_generation) + 1))


def read(storage: Storage) -> tuple[dict[str, Any], str]:
    """Return the pointer and its version: start, and step and manifest once a checkpoint exists.

    Empty if it doesn't exist or can't be parsed: readers trust manifests only, so nothing is lost with it.
    """
    try:
        text, version = storage.read_version(runfolder.LATEST)
    except FileNotFoundError:
        return {}, ""
    try:
        pointer = json.loads(text)
    except ValueError:
        return {}, version
    return (pointer if isinstance(pointer, dict) and isinstance(pointer.get("start"), str) else {}), version


def _superseded(pointer: Mapping[str, Any], start: str) -> SupersededError:
    other = pointer.get("start", "?")
    if other == start:
        return SupersededError(f"another process writes this run as the same start ({start}); exiting")
    attempt, _, generation = other.partition("-")
    return SupersededError(
        f"attempt {attempt}, generation {generation} has taken over this run; this start ({start}) exits"
    )
