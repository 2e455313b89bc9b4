"""Find and kill the processes that a killed replica leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def no_process_left() -> Iterator[None]:
    """At the end, kill all processes that were started inside, including orphans.

    On Linux orphans become children of this process (PR_SET_CHILD_SUBREAPER), which can then find them.
    """
    before = set(children())
    set_subreaper(1)
    try:
        yield
    finally:
        kill_children(lambda pid: pid not in before)
        set_subreaper(0)


def set_subreaper(value: int) -> None:
    """Turn subreaping on or off. Linux only; elsewhere only the process groups are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def children() -> list[int]:
    """Return the ids of this process's children; empty without /proc."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                pids += map(int, (task / "children").read_text().split())
    return pids


def kill_children(is_left: Callable[[int], bool]) -> None:
    """Kill this process's children for which `is_left` is true, and the orphans that they leave, and wait for them."""
    while orphans := [pid for pid in children() if is_left(pid)]:
        for pid in orphans:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
