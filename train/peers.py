"""The other ranks' processes on this machine: whether one of them has exited, by /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from train.dist import Ranks, gather


class Process(NamedTuple):
    """One process, and where its number means anything."""

    space: str
    """The machine's boot and the namespace of process numbers: two containers of one machine have different ones."""
    pid: int
    started: str
    """In clock ticks since the machine's boot: no later process with this number has the same."""


class Peers:
    """Made by all ranks together. Those on other machines are the affair of their nodes, which report to ours."""

    def __init__(self, ranks: Ranks) -> None:
        mine = this_process()
        self._here = [one for one in gather(ranks, mine) if one.space == mine.space and one != mine]

    def failed(self) -> bool:
        """Whether a peer on this machine has exited."""
        return any(_started(one.pid) != one.started for one in self._here)


def this_process() -> Process:
    """Without /proc no two processes share a machine, as far as anyone can tell."""
    pid, space = os.getpid(), ""
    with suppress(OSError):
        space = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return Process(space or str(os.urandom(8)), pid, _started(pid))


def _started(pid: int) -> str:
    """Empty if there is no such process, or a zombie only. pid (name) state ppid …, the 22nd: proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
