"""Keep `progress.json` in the run folder up to date: the newest row, the only metrics that a list of runs reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from launch_train import runfolder
from launch_train.common.errors import OutputError
from launch_train.telemetry.rows import Row, plain
from launch_train.telemetry.upload_queue import Outbox

EVERY_SECONDS: Final = 30.0
"""Shortest time between two uploads: each costs a request."""


class NewestRow:
    """Writes the newest row of one start of the processes. A failure affects only this object."""

    def __init__(self, outbox: Outbox, attempt: int) -> None:
        self._outbox, self._attempt = outbox, attempt
        self._steps: Any = None
        self._row: Row | None = None
        """The newest row, unless it was written."""
        self._due = float("-inf")

    def add(self, rows: Sequence[Row]) -> None:
        """Record rows, and upload the newest one if that is due."""
        for row in rows:
            if row.get("event") == "start":
                config = row.get("config")
                self._steps = row.get("steps") or (config.get("steps") if isinstance(config, Mapping) else None)
            elif "event" not in row and "step" in row:
                self._row = row
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Upload the newest row unless it is uploaded already."""
        if self._row is None:
            return
        row, self._row = self._row, None
        self._due = time.monotonic() + EVERY_SECONDS
        record = {"attempt": self._attempt, "steps": self._steps, "row": plain(row)}
        with suppress(OutputError):
            self._outbox.replace(runfolder.PROGRESS, json.dumps(record, allow_nan=False).encode())
