"""Who may write a run's checkpoints: one start, named in `checkpoints/LATEST`, which changes by compare-and-swap.

A start takes the pointer over before it reads anything, and moves it with each checkpoint. An older start that is still
alive (a machine that was cut off, a second launch) finds it changed at its next checkpoint, and leaves.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from launch_train.common import contract
from launch_train.common.errors import SupersededError
from launch_train.common.storage import Storage

TRIES = 10
"""Of taking over while others do the same."""


class Fence:
    """This start's right to write checkpoints. `start` is its name, later ones sort behind it."""

    def __init__(self, storage: Storage, start: str) -> None:
        """Take the pointer over. Raises SupersededError if this or a later start has it."""
        self.start = start
        self._storage = storage
        self._nonce = uuid.uuid4().hex
        self._held: Mapping[str, Any] = {}
        self._version = self._take()

    def check(self, storage: Storage | None = None) -> None:
        """Raise SupersededError if another start has taken over. `storage` is the same folder, perhaps with less
        patience."""
        held, version = read(storage or self._storage)
        if held.get("nonce") != self._nonce:
            raise _superseded(held, self.start)
        self._held, self._version = held, version  # ours in any case: a swap of which we heard only that it failed

    def advance(self, step: int, manifest: str, storage: Storage | None = None) -> None:
        """Point at a new checkpoint. Raises SupersededError if another start has taken over."""
        folder = storage or self._storage
        for _ in range(TRIES):
            content = {**self._held, "step": step, "manifest": manifest}
            try:
                self._version = folder.swap(contract.LATEST, _encoded(content), self._version)
            except FileExistsError:
                self.check(folder)
            else:
                self._held = content
                return
        raise _superseded(read(folder)[0], self.start)

    def _take(self) -> str:
        for _ in range(TRIES):
            held, version = read(self._storage)
            if held.get("start", "") >= self.start:
                raise _superseded(held, self.start)
            self._held = {**held, "start": self.start, "nonce": self._nonce}
            with suppress(FileExistsError):
                return self._storage.swap(contract.LATEST, _encoded(self._held), version)
        raise _superseded(read(self._storage)[0], self.start)


def taken(storage: Storage, env: Mapping[str, str]) -> Fence:
    """The fence of the start that the node has numbered in `env`, or by hand of the one behind the last. Raises
    SupersededError if this or a later start has it."""
    attempt, generation = env.get(contract.ATTEMPT), env.get(contract.GENERATION)
    numbered = contract.start_name(int(attempt), int(generation)) if attempt and generation else ""
    return Fence(storage, numbered or next_start(storage))


def read(storage: Storage) -> tuple[dict[str, Any], str]:
    """The pointer (start, and step and manifest once there is a checkpoint) and its version; empty if there is none, or
    if what is there isn't ours: readers trust manifests only, so nothing is lost with it."""
    try:
        text, version = storage.read_version(contract.LATEST)
    except FileNotFoundError:
        return {}, ""
    try:
        held = json.loads(text)
    except ValueError:
        return {}, version
    return (held if isinstance(held, dict) and isinstance(held.get("start"), str) else {}), version


def next_start(storage: Storage) -> str:
    """A name behind the one that has the pointer, for a process that no node has given a number."""
    start = read(storage)[0].get("start", "0001-0000")
    attempt, _, generation = start.partition("-")
    return contract.start_name(int(attempt), int(generation) + 1)


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content).encode()


def _superseded(held: Mapping[str, Any], start: str) -> SupersededError:
    other = held.get("start", "?")
    if other == start:
        return SupersededError(f"another process writes this run as the same start ({start}); this one leaves it alone")
    attempt, _, generation = other.partition("-")
    return SupersededError(
        f"attempt {attempt}, generation {generation} has taken this run over; this start ({start}) leaves it alone"
    )
