"""Cancel a run on this machine through a file in its folder, which makes its `launch local` stop the processes.

No signal is sent from here: a recorded process ID may belong to another process by now, and the run may be on another
machine that shares the disk.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launch_train import runfolder
from launch_train.common.storage import LocalFolder
from launcher.gcp.storage import use_errors
from launcher.services.local.attempts import newest_attempt

if TYPE_CHECKING:
    from launch_train.common.storage import Storage

POLL_SECONDS: Final = 0.5


def request_cancel(storage: Storage) -> None:
    """Write the request to cancel the newest attempt. Raises UsageError: the folder can't be written."""
    with use_errors(), suppress(FileExistsError):
        if number := newest_attempt(storage):
            storage.write(runfolder.attempt_cancel(number), b"launch cancel\n", create=True)


def is_attempt_cancelled(folder: Path) -> bool:
    """Return whether `launch cancel` stopped the newest attempt of a run folder. Raises UsageError: unreadable."""
    with use_errors():
        return (folder / runfolder.attempt_cancel(newest_attempt(LocalFolder(folder)))).exists()
