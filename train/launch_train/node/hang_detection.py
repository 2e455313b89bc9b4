"""Hang detection: check this node's processes for progress, and take their stacks when they hang.

The node checks from outside, so it doesn't matter what they hang in: a kernel that never ends, a dead peer, a lock, an
extension that holds the interpreter. faulthandler writes the stacks from a signal handler in C.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common import heartbeat
from launch_train.common.heartbeat import Beat
from launch_train.node.process import descendants, helpers

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

RECORDER: Final = "nccl-"
"""Prefix of the pipes and dumps of NCCL's flight recorder in the folder contract.WATCH; the rank follows."""

DUMP_S: Final = 5.0
"""Time for all ranks to write a dump: a thread of torch's polls the pipe once a second."""

DUMP_BYTES: Final = 16 << 20
"""Upper bound for one rank's dump."""

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
        heartbeat.create_heartbeat(folder)

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
        below = sorted(descendants(os.getpid()) - helpers)
        files = {pid: self._folder / str(pid) for pid in below if _handles_signal(pid)}
        for pid, path in files.items():
            with suppress(OSError):
                os.truncate(path, 0)
                os.kill(pid, SIGNAL)
        time.sleep(WRITE_S)
        return b"\n".join(filter(None, map(_head, files.values())))[:STACKS_BYTES]

    def dump_collectives(self) -> str:
        """Let each rank write the dump of NCCL's flight recorder, and return which ranks are behind (see `behind`).

        A thread of torch's (C++) reads the pipe, whatever the rank hangs in; only a rank that holds the interpreter
        writes no dump. Without NCCL there is no pipe, and no wait.
        """
        paths = self._folder.glob(f"{RECORDER}*.pipe")
        pipes = {rank: path for path in paths if (rank := _rank_in_name(path.stem)) is not None}
        for path in pipes.values():
            with suppress(OSError):  # its rank has exited
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"1")
                os.close(pipe)
        until = time.monotonic() + DUMP_S
        while not pipes.keys() <= self.collectives().keys() and time.monotonic() < until:
            time.sleep(0.1)
        return behind(self.collectives())

    def collectives(self) -> dict[int, bytes]:
        """Return the complete dumps of the flight recorder by rank, requested or written by torch at a timeout."""
        dumps: dict[int, bytes] = {}
        for path in self._folder.glob(f"{RECORDER}*"):
            if (rank := _rank_in_name(path.name)) is not None:
                with suppress(OSError), path.open("rb") as file:
                    content = file.read(DUMP_BYTES + 1)
                    if content.endswith(pickle.STOP) and len(content) <= DUMP_BYTES:
                        dumps[rank] = content
        return dict(sorted(dumps.items()))

    def _beat(self) -> Beat:
        """Return the newest heartbeat; a script's output counts as one too."""
        beat = heartbeat.newest_beat(self._folder)
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


def behind(dumps: Mapping[int, bytes]) -> str:
    """Return which ranks have not joined the collective in which others wait, or "" if none or unknown."""
    enqueued: dict[str, dict[int, int]] = {}
    for rank, dump in dumps.items():
        with suppress(Exception):  # another version of torch may write something else
            for group, status in pickle.loads(dump)["pg_status"].items():  # noqa: S301 - of this run's own processes
                enqueued.setdefault(group, {})[rank] = int(status["last_enqueued_collective"])
    names = []
    for counts in enqueued.values():
        most = max(counts.values())
        names += [
            f"rank {rank} has joined {count} collectives, others {most}"
            for rank, count in counts.items()
            if count < most
        ]
    return "; ".join(names[:4])


def _rank_in_name(name: str) -> int | None:
    """Return the rank in the name of a pipe or dump; None for another file."""
    text = name.removeprefix(RECORDER)
    return int(text) if name.startswith(RECORDER) and text.isdecimal() else None


def _head(path: Path) -> bytes:
    """Return what one process wrote, at most PROCESS_BYTES of it."""
    with suppress(OSError), path.open("rb") as file:
        rank = rank_of(path.name)
        return f"{'' if rank is None else f'rank {rank}, '}process {path.name}\n".encode() + file.read(PROCESS_BYTES)
    return b""


def rank_of(pid: str) -> int | None:
    """Return the RANK with which a process was started; None: it has none, or has ended."""
    with suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace")
        if forked := re.fullmatch(r"rank (\d+)\n", name):  # node/torchrun_preloaded.py
            return int(forked[1])
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
            return int(rank[1])
    return None
