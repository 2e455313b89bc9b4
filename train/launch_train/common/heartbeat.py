"""Heartbeat of the training processes for their node's hang detection: the deadline of their next progress.

It is two numbers in a memory-mapped file: cheap enough for each training step, and the node can read it whatever this
process hangs in.
"""

from __future__ import annotations

import math
import mmap
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launch_train.common import contract

FILE = "heartbeat"
"""In the folder contract.WATCH."""

_BEAT = struct.Struct("dd")


class Beat(NamedTuple):
    """Time of the last progress, and deadline of the next: time.monotonic() of this machine. Infinity: no deadline."""

    last: float
    deadline: float


class Heartbeat:
    """Writes the heartbeat; without a node it does nothing."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._map: mmap.mmap | None = None
        if folder := env.get(contract.WATCH):
            with suppress(OSError, ValueError), (Path(folder) / FILE).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _BEAT.size)

    def expect(self, seconds: float) -> None:
        """Set the deadline of the next call, in seconds; a process that misses it counts as hung. math.inf: no
        deadline."""
        if self._map:
            now = time.monotonic()
            _BEAT.pack_into(self._map, 0, now, now + seconds)

    def extend(self, seconds: float) -> None:
        """Set the deadline as `expect` does, unless another process has set a later one."""
        if self._map and not time.monotonic() + seconds < _BEAT.unpack_from(self._map)[1] < math.inf:
            self.expect(seconds)


def create_heartbeat(folder: Path) -> None:
    """Create the file, without a deadline."""
    (folder / FILE).write_bytes(_BEAT.pack(time.monotonic(), math.inf))


def newest_beat(folder: Path) -> Beat:
    """Return the file's heartbeat; one without a deadline if it can't be read."""
    with suppress(OSError, struct.error):
        return Beat(*_BEAT.unpack((folder / FILE).read_bytes()))
    return Beat(time.monotonic(), math.inf)
