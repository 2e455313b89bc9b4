"""Temporary folders that a killed process doesn't leave for long: the next process that makes one removes them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "launch-tmp-"


@contextmanager
def temporary_folder(kind: str) -> Iterator[str]:
    """Yield a new temporary folder, and remove it at the end. `kind` is part of its name.

    Its process holds a lock on it (flock(2)), which the kernel releases even after kill -9: folders without a lock are
    removed here.
    """
    import fcntl  # Windows lacks it, and imports this module for a plan

    for entry in os.scandir(tempfile.gettempdir()):
        if entry.name.startswith(PREFIX):
            with suppress(OSError):  # locked, somebody else's, or gone
                handle = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(handle).st_uid == os.getuid():
                        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(handle)
    while True:
        path = tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-")
        with suppress(FileNotFoundError):  # another process has removed it before it was locked
            handle = os.open(path, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, on which nothing is removed either
                fcntl.flock(handle, fcntl.LOCK_EX)
            if Path(path).exists():
                break
            os.close(handle)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)
