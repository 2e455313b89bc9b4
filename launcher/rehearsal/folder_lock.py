"""One `launch local` of a run at a time on this machine."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import UsageError

TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def turn(folder: Path) -> Iterator[bool]:
    """Whether nobody else has the run folder now; if so it is ours as long as this lasts.

    The folder itself is locked (flock(2)): nothing is written, and the kernel lets go with this process, kill -9
    included. A file system that can't lock gives everybody the turn.

    Raises:
        UsageError: the folder can't be made or opened.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"the run folder can't be used: {folder}: {error.strerror}", "Write somewhere else: --output DIR"
        ) from error
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def is_taken(folder: Path) -> bool:
    """Return whether a `launch local` has the run folder now. False where that can't be seen."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _locked(handle: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in TAKEN
    return True
