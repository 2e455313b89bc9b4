"""Upload the TensorBoard event files that a script writes to a folder (`run.metrics.tensorboard` of a spec)."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.telemetry.upload_queue import Outbox

LEAST_SECONDS: Final = 10.0
"""Shortest time between two uploads of a file. It is uploaded whole, so a larger one waits longer."""

BYTES_PER_SECOND: Final = 1 << 20
"""Mean upload rate that a growing file may cause."""


def event_paths(folder: Path) -> list[Path]:
    """Return the event files below a folder, in which a script may delete folders meanwhile."""
    for _ in range(5):
        with suppress(OSError):  # a folder was deleted between its listing and its own
            return sorted(folder.rglob(contract.EVENT_FILES))
    return []


@dataclass
class EventFiles:
    """The event files below `folder`, which may not exist yet.

    They are stored below logs/script of the run folder, beside launch's own curves, in the same sub-folders, which are
    runs to TensorBoard. The names hold time, host and process, so files of several starts and nodes don't collide.
    """

    folder: Path
    outbox: Outbox
    logs: Path | None = None
    """logs/ of the run folder as a path, whose files are not copied."""
    _sent: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Size and modification time of each file when it was last uploaded."""
    _due: dict[Path, float] = field(default_factory=dict)
    """time.monotonic() from which each file may be uploaded again."""

    def upload(self, *, last: bool = False) -> None:
        """Upload the files that have changed, if they are due or this is the `last` call. Raises OutputError."""
        for path in event_paths(self.folder):
            if self.logs and path.is_relative_to(self.logs):
                continue
            try:
                self._upload(path, path.stat(), last)
            except (FileNotFoundError, OutputError):
                if path.exists():
                    raise  # else the script has deleted it

    def _upload(self, path: Path, status: os.stat_result, last: bool) -> None:
        state = (status.st_size, status.st_mtime_ns)
        early = not last and time.monotonic() < self._due.get(path, 0.0)
        if early or state == self._sent.get(path) or not path.is_file():
            return
        name = path.relative_to(self.folder).as_posix().replace("\\", "_")
        self.outbox.put_file(f"{runfolder.LOGS}/script/{name}", path)
        self._sent[path] = state
        self._due[path] = time.monotonic() + max(LEAST_SECONDS, status.st_size / BYTES_PER_SECOND)
