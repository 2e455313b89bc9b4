"""The processes of a command that save at a signal: they get it before its launchers and their DataLoader workers do.

Each registers by a file with its process id as name, which it keeps locked. The kernel releases the lock when the
process exits, however it does, and a forked process doesn't inherit it (fcntl(2), F_SETLK).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launch_train.common import contract

_SUFFIX = ".signalled"


def register_for_signals(env: Mapping[str, str]) -> None:
    """Let the node send the signals of a command to this process, until it exits. Without a node it does nothing."""
    if folder := env.get(contract.WATCH):
        with suppress(OSError):  # the node has ended
            file = os.open(Path(folder, f"{os.getpid()}{_SUFFIX}"), os.O_WRONLY | os.O_CREAT)
            fcntl.lockf(file, fcntl.LOCK_EX)


def registered_processes(folder: Path) -> set[int]:
    """Return the ids of the registered processes that have not exited."""
    pids = set()
    for path in folder.glob(f"*{_SUFFIX}"):
        with path.open("r+b") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # which of them depends on the system
                pids.add(int(path.stem))
    return pids
