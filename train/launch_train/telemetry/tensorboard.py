"""Write TensorBoard events of a run to its folder `logs/`. Optional: disabled if TensorBoard is not installed.

Event files grow by appending, which bucket objects don't support. For a bucket, a file is written on the local disk and
uploaded whole after each change; a new file is started before it gets large. Of TensorBoard only the messages are
imported: its writers, and torch's, take from 0.7 s to import.
"""

from __future__ import annotations

import re
import secrets
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launch_train.telemetry.event_files import mask_crc
from launch_train.telemetry.rows import scalars
from launch_train.telemetry.upload_queue import Outbox

FILE_BYTES = 1 << 20
"""Size after which a new file is started: each upload sends the whole file."""

OWN_FILE = re.compile(r"events\.out\.tfevents\.\d{4,}-\d{4,}-\d{10}\.\d{6}-[0-9a-f]{8}-\d{6}")
"""Matches the names of launch's own event files."""

Push = Callable[[Path], object]


def open_board(storage: Storage, outbox: Outbox, start: str) -> Board | None:
    """Open a board in the run folder; print a line and return None if TensorBoard is missing or fails.

    `start` names this start of the run, so that its files sort after those of earlier starts. The time sorts scripts
    that have no attempt number; the random suffix separates files of the same moment.
    """
    try:
        import tensorboard.compat.proto.event_pb2  # noqa: F401 - an ImportError must occur here

        stem = f"events.out.tfevents.{start}-{time.time():017.6f}-{secrets.token_hex(4)}"
        if isinstance(storage, LocalFolder):
            folder = storage.folder / runfolder.LOGS
            folder.mkdir(parents=True, exist_ok=True)
            return Board(folder, stem)
        # After a kill it is removed with the outbox.
        folder = Path(tempfile.mkdtemp(prefix="launch-logs-", dir=outbox.folder))
        return Board(folder, stem, lambda path: outbox.put_file(f"{runfolder.LOGS}/{path.name}", path))
    except ImportError:
        print("TensorBoard is not installed: no events are written", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - TensorBoard is optional; no error in it may end a run
        print(f"no TensorBoard events are written: {error}", file=sys.stderr, flush=True)
    return None


class Board:
    """Writes the numbers of rows as scalars, except the step and the time.

    TensorBoard reads the files of a folder in order of their names, each to its end. `push` uploads a file; without it
    TensorBoard reads `folder` itself.
    """

    def __init__(self, folder: Path, stem: str, push: Push | None = None) -> None:
        self._folder, self._stem, self._push = folder, stem, push
        self._file: IO[bytes] | None = None
        self._flushed = self._number = 0
        self._begun = False

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if values := scalars(row):
                self._write(row, values)
        self._copy()

    def close(self) -> None:
        self._end_file()
        if self._push:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._file and self._file.tell() > FILE_BYTES:
            self._end_file()
        events = []
        if not self._file:
            self._file = (self._folder / f"{self._stem}-{self._number:06d}").open("xb")
            self._flushed = 0
            self._number += 1
            events.append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        at = {"wall_time": row.get("time", time.time()), "step": row["step"]}
        if not self._begun:  # TensorBoard then discards points of earlier starts at this step and later
            events.append(Event(**at, session_log=SessionLog(status=SessionLog.START)))
            self._begun = True
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        for event in [*events, Event(**at, summary=summary)]:
            self._file.write(record(event.SerializeToString()))

    def _copy(self) -> None:
        """Flush, and upload the file if it has new events."""
        if self._file and self._file.tell() > self._flushed:
            self._file.flush()
            self._flushed = self._file.tell()
            if self._push:
                self._push(Path(self._file.name))

    def _end_file(self) -> None:
        """Close the current file, and delete it if it was uploaded."""
        if self._file:
            self._copy()
            self._file.close()
            if self._push:
                Path(self._file.name).unlink()
        self._file = None


def record(event: bytes) -> bytes:
    """Return an event as a record of an event file (telemetry.event_files)."""
    try:
        from google_crc32c import value as crc32c
    except ImportError:  # in another environment's Python (launch local --python)
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c  # type: ignore[no-redef]
    length = struct.pack("<Q", len(event))
    length_crc, event_crc = (struct.pack("<I", mask_crc(crc32c(part))) for part in (length, event))
    return length + length_crc + event + event_crc
