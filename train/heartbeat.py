"""What the training processes tell their node for its hang detection: by when they will have made progress again.

It is two numbers in a file that is mapped into memory: a training step can afford it, and the node can read it whatever
this process hangs in.
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

from train import contract

FILE = "heartbeat"
"""In the folder contract.WATCH."""

_BEAT = struct.Struct("dd")


class Beat(NamedTuple):
    """When the processes made progress last, and by when they will have done so again: time.monotonic() of this
    machine. Infinity: no expectation."""

    last: float
    deadline: float


class Heartbeat:
    """The line to the node; without a node nothing happens."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._map: mmap.mmap | None = None
        if folder := env.get(contract.WATCH):
            with suppress(OSError, ValueError), (Path(folder) / FILE).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _BEAT.size)

    def expect(self, seconds: float) -> None:
        """The next call comes within so many seconds; if not, this process hangs. math.inf: it may take any time."""
        if self._map:
            now = time.monotonic()
            _BEAT.pack_into(self._map, 0, now, now + seconds)


def create(folder: Path) -> None:
    """Make the file, without an expectation yet."""
    (folder / FILE).write_bytes(_BEAT.pack(time.monotonic(), math.inf))


def newest(folder: Path) -> Beat:
    """What the file holds; no expectation if it can't be read."""
    with suppress(OSError, struct.error):
        return Beat(*_BEAT.unpack((folder / FILE).read_bytes()))
    return Beat(time.monotonic(), math.inf)
