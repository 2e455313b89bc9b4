"""Hang detection: check this node's processes for progress, and take their stacks when they hang.

The node checks from outside, so it doesn't matter what they hang in: a kernel that never ends, a dead peer, a lock, an
extension that holds the interpreter. faulthandler writes the stacks from a signal handler in C.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common import heartbeat
from launch_train.common.heartbeat import Beat
from launch_train.node.process import descendants

SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGUSR2)
"""Requests stacks; train/launch_train/node/sitecustomize/sitecustomize.py handles it. SIGUSR1 and SIGUSR2 may be the
user's."""

STACKS_BYTES, PROCESS_BYTES = 1 << 20, 1 << 16
"""Upper bounds for all stacks, and for one process's."""

WRITE_S: Final = 1.0
"""Time for all processes to write their stacks."""

NEAR_S: Final = 5.0
"""Nodes of a run hang together, but notice it some seconds apart."""

COMPILE_S: Final = 1800.0
"""Extra time for a process that compiles, whose stacks are checked every AGAIN_S."""
AGAIN_S: Final = 60.0

_COMPILING: Final = re.compile(
    rb"/torch/(_dynamo/convert_frame|_inductor/(graph|scheduler|async_compile|codecache))\.py"
)
"""In the stacks of a process that compiles a step again, which may take longer than any other step."""


class HangDetector:
    """Detects hangs of one generation on this node.

    `silence`: seconds without a line of output or a row of metrics after which a script counts as hung; None: the
    heartbeat alone counts. `heard`: time.monotonic() of the newest line of output.
    """

    def __init__(self, folder: Path, silence: float | None, heard: Callable[[], float]) -> None:
        self._folder = folder
        self._silence = silence
        self._heard = heard
        self._began = time.monotonic()
        self._compiling = -math.inf
        """Time until which a compilation is not checked again."""
        folder.mkdir(exist_ok=True)
        heartbeat.create(folder)

    def found(self) -> bytes | None:
        """Return the stacks of all Python processes (maybe empty) if they hang; None if they don't."""
        if not self.is_overdue() or time.monotonic() < self._compiling:
            return None
        stacks = self.stacks()
        if _COMPILING.search(stacks) and not self.is_overdue(COMPILE_S):
            self._compiling = time.monotonic() + AGAIN_S
            return None
        return stacks if self.is_overdue() else None

    def is_overdue(self, seconds: float = 0.0) -> bool:
        """Return whether the deadline passed more than `seconds` ago."""
        return time.monotonic() - seconds > self._beat().deadline

    def silent(self) -> float:
        """Return the seconds since the newest sign of progress."""
        return time.monotonic() - self._beat().last

    def stacks(self) -> bytes:
        """Return the stacks of the Python processes below this one, which continue to run."""
        files = {pid: self._folder / str(pid) for pid in sorted(descendants(os.getpid())) if _handles_signal(pid)}
        for pid, path in files.items():
            with suppress(OSError):
                os.truncate(path, 0)
                os.kill(pid, SIGNAL)
        time.sleep(WRITE_S)
        return b"\n".join(filter(None, map(_head, files.values())))[:STACKS_BYTES]

    def _beat(self) -> Beat:
        """Return the newest heartbeat; a script's output counts as one too."""
        beat = heartbeat.newest(self._folder)
        if self._silence is None or (heard := self._heard()) < self._began:
            return beat
        if beat.deadline == math.inf:
            return Beat(heard, heard + self._silence)
        # A line that another process prints does not shorten the time announced for a checkpoint.
        return Beat(max(heard, beat.last), max(heard + self._silence, beat.deadline))


def _handles_signal(pid: int) -> bool:
    """Return whether a process handles SIGNAL, which would end it otherwise: its mask SigCgt, proc_pid_status(5)."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (SIGNAL - 1) & 1)
    return False


def _head(path: Path) -> bytes:
    """Return what one process wrote, at most PROCESS_BYTES of it."""
    with suppress(OSError), path.open("rb") as file:
        return f"{_rank(path.name)}process {path.name}\n".encode() + file.read(PROCESS_BYTES)
    return b""


def _rank(pid: str) -> str:
    with suppress(OSError):
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
            return f"rank {int(rank[1])}, "
    return ""
