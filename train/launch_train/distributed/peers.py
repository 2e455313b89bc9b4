"""Detect by /proc whether another rank's process on this machine has exited."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from launch_train.distributed.process_group import Ranks, gather


class Process(NamedTuple):
    """One process, and the namespace in which its number is valid."""

    space: str
    """The machine's boot and the namespace of process numbers: two containers of one machine have different ones."""
    pid: int
    started: str
    """Start time in clock ticks since boot: distinguishes it from a later process with the same number."""


class Peers:
    """The ranks on this machine; all ranks must create it together. Other nodes watch their own."""

    def __init__(self, ranks: Ranks) -> None:
        mine = this_process()
        self._local = [process for process in gather(ranks, mine) if process.space == mine.space and process != mine]

    def failed(self) -> bool:
        return any(_start_time(process.pid) != process.started for process in self._local)


def this_process() -> Process:
    """Return this process. Without /proc, no two processes count as on one machine."""
    pid, space = os.getpid(), ""
    with suppress(OSError):
        space = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return Process(space or str(os.urandom(8)), pid, _start_time(pid))


def _start_time(pid: int) -> str:
    """Return a process's start time; empty if it doesn't exist or is a zombie. Field 22 of proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
