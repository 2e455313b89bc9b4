"""No process is left behind: also those that a killed replica leaves are found and ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def no_process_left() -> Iterator[None]:
    """Everything that was started inside is gone at the end, also what a killed replica left behind.

    On Linux orphans are handed to this process (PR_SET_CHILD_SUBREAPER), which can then find and kill them.
    """
    before = set(children())
    set_subreaper(1)
    try:
        yield
    finally:
        while orphans := [pid for pid in children() if pid not in before]:
            for pid in orphans:
                kill_and_reap(pid)
        set_subreaper(0)


def set_subreaper(value: int) -> None:
    """Linux only; elsewhere the process groups must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children; empty where /proc doesn't tell."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that ended meanwhile has no children any more
                found += map(int, (task / "children").read_text().split())
    return found


def kill_and_reap(pid: int) -> None:
    """End one child for good."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
