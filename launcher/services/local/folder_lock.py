"""Lock a run folder against a second local process."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import UsageError

TRIES, PROBE_SECONDS = 4, 0.05
"""A process that lists runs holds each lock for an instant (`is_taken`): the lock is tried again."""
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def lock_run_folder(folder: Path) -> Iterator[bool]:
    """Lock the run folder while the context lasts; yield False if another process has it.

    The folder itself is locked (flock(2)): nothing is written, and the kernel releases it when this process ends, even
    by kill -9. On a file system without locks every process gets it.

    Raises UsageError: the folder can't be created or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"the run folder can't be used: {folder}: {error.strerror}", "Choose another folder: --output DIR"
        ) from error
    try:
        for _ in range(TRIES - 1):
            if _locked(handle):
                break
            time.sleep(PROBE_SECONDS)
        yield _locked(handle)
    finally:
        os.close(handle)


def is_taken(folder: Path) -> bool:
    """Return whether a `launch local` has locked the run folder; False if unknown."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(handle, shared=True)
    finally:
        os.close(handle)


def _locked(handle: int, *, shared: bool = False) -> bool:
    import fcntl  # Windows, which lacks it, shows the help of each command

    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in TAKEN
    return True
