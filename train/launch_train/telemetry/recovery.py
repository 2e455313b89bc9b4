"""Upload what dead processes of a node left in its spool folder (contract.SPOOL) on the node's disk."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import Storage
from launch_train.telemetry.upload_queue import sweep

_SLICE_S: Final = 10.0
"""Longest single try in seconds; between two, the node checks for a stop request."""


class Leftovers:
    """Spool folder of a node, with the files that its processes left in it."""

    def __init__(self, folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._storage = storage
        self._say = say

    def send(self, left: Callable[[], float]) -> int:
        """Upload files of dead processes while `left()` is positive; return the number of objects that remain."""
        while True:
            try:
                count = sweep(self.folder, self._storage, max(0.1, min(_SLICE_S, left())))
            except Exception as error:  # noqa: BLE001 - a failed upload must not fail a successful run
                self._say(f"files left in {self.folder} could not be uploaded: {error}")
                return 1
            seconds = left()
            if not count or seconds <= 0:
                return count
            time.sleep(min(0.5, seconds))

    def close(self, left: Callable[[], float]) -> None:
        """Upload the rest; report files that remain, with their folder."""
        if count := self.send(left):
            files, are = ("1 file", "is") if count == 1 else (f"{count} files", "are")
            self._say(f"{files} did not reach {self._storage.url} and {are} in {self.folder}: keep this machine's disk")


def spool_folder(environ: Mapping[str, str], url: str, node: int) -> Path:
    """Create the node's spool folder for the run folder `url`, or a fresh one if that name is not safe to use.

    The name is the same at each start, so that a restarted node finds the files of the killed one. The parent is
    contract.SPOOL, TMPDIR or /var/tmp, in preference to /tmp, which may be in memory. Raises OutputError.
    """
    parent = Path(environ.get(contract.SPOOL) or environ.get("TMPDIR") or _temporary())
    folder = parent / f"launch-spools-{hashlib.sha256(url.encode()).hexdigest()[:16]}-{node:04d}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            return folder
        return Path(tempfile.mkdtemp(prefix="launch-spools-", dir=parent))
    except OSError as error:
        raise OutputError(f"cannot create a folder in {parent}: {error.strerror or error}") from error


def _temporary() -> str:
    kept = "/var/tmp"  # noqa: S108 - kept across reboots (hier(7)); _is_ours checks the owner
    return kept if os.access(kept, os.W_OK) else tempfile.gettempdir()


def _is_ours(folder: Path) -> bool:
    """Return whether only this user can have created the folder: its name is predictable."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def prune(folder: Path) -> None:
    """Remove a folder that contains nothing but empty folders."""
    for below in sorted(folder.rglob("*"), reverse=True):
        if below.is_dir():
            with suppress(OSError):
                below.rmdir()
    with suppress(OSError):
        folder.rmdir()
