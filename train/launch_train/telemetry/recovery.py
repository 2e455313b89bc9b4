"""What the processes of a node had not sent to the run folder when they died: it lies on the node's own disk
(contract.SPOOL), and the node sends it."""

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
"""One try. Between two, the node looks whether it was told to stop."""


class Leftovers:
    """The spool folder of a node and all that its processes leave in it."""

    def __init__(self, folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._storage = storage
        self._say = say

    def send(self, left: Callable[[], float]) -> int:
        """Send what dead processes left, while `left` says that there are seconds; how many objects remain."""
        while True:
            try:
                count = sweep(self.folder, self._storage, max(0.1, min(_SLICE_S, left())))
            except Exception as error:  # noqa: BLE001 - whatever it is: a run that went well ends well
                self._say(f"files left in {self.folder} could not be uploaded: {error}")
                return 1
            seconds = left()
            if not count or seconds <= 0:
                return count
            time.sleep(min(0.5, seconds))

    def close(self, left: Callable[[], float]) -> None:
        """Send the rest; what could not be sent stays, and its place is said."""
        if count := self.send(left):
            files, lie = ("1 file", "lies") if count == 1 else (f"{count} files", "lie")
            self._say(f"{files} did not reach {self._storage.url} and {lie} in {self.folder}: keep this machine's disk")


def spool_folder(environ: Mapping[str, str], url: str, node: int) -> Path:
    """A folder of our own for the run folder `url` on this machine, made now.

    The same one for each start, so that a node that was killed and starts again finds what it had left. Not in /tmp,
    which may be memory; a spec's TMPDIR says where there is room.
    """
    parent = Path(environ.get(contract.SPOOL) or environ.get("TMPDIR") or _temporary())
    folder = parent / f"launch-spools-{hashlib.sha256(url.encode()).hexdigest()[:16]}-{node:04d}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            return folder
        return Path(tempfile.mkdtemp(prefix="launch-spools-", dir=parent))
    except OSError as error:
        raise OutputError(f"no folder can be made in {parent}: {error.strerror or error}") from error


def _temporary() -> str:
    kept = "/var/tmp"  # noqa: S108 - for "temporary files preserved between reboots" (hier(7)); see _is_ours
    return kept if os.access(kept, os.W_OK) else tempfile.gettempdir()


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can have prepared it: the name can be guessed."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def prune(folder: Path) -> None:
    """Remove it, if there is nothing in it but empty folders."""
    for below in sorted(folder.rglob("*"), reverse=True):
        if below.is_dir():
            with suppress(OSError):
                below.rmdir()
    with suppress(OSError):
        folder.rmdir()
