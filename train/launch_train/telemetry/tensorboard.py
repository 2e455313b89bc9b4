"""TensorBoard's events of a run, in its folder `logs/`. Optional: without the package there are none.

Events are appended to a file, and objects of a bucket can't be appended to: for a bucket the file is written on this
machine's disk and copied whole, and a new one is begun before it gets large. TensorBoard's own format writer is used
rather than torch's, so that a script without torch needs none.
"""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launch_train.common import contract
from launch_train.common.storage import LocalFolder, Storage
from launch_train.telemetry.upload_queue import Outbox

FILE_BYTES = 1 << 20
"""A new file is begun when one is larger: each copy sends the whole file."""

Push = Callable[[Path], object]


def open_board(storage: Storage, outbox: Outbox, start: str) -> Board | None:
    """A board in the run folder, or None, with a line that says so, if TensorBoard is not installed or can't work.

    `start` names this start of the run: its files come after those of the starts before it. The time sorts scripts
    that know no attempt; what follows it keeps two of one moment apart.
    """
    try:
        return _opened(storage, outbox, f"events.out.tfevents.{start}-{time.time():017.6f}-{secrets.token_hex(4)}")
    except ImportError:
        print("TensorBoard is not installed: no events are written", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - it is an extra: no trouble of it may end a run
        print(f"no TensorBoard events are written: {error}", file=sys.stderr, flush=True)
    return None


def _opened(storage: Storage, outbox: Outbox, stem: str) -> Board:
    import tensorboard.compat.proto.event_pb2
    import tensorboard.summary.writer.record_writer  # noqa: F401 - now, where it can still be said that there is none

    if isinstance(storage, LocalFolder):
        folder = storage.folder / contract.LOGS
        folder.mkdir(parents=True, exist_ok=True)
        return Board(folder, stem)
    folder = Path(tempfile.mkdtemp(prefix="launch-logs-", dir=outbox.folder))  # removed with the outbox after a kill
    return Board(folder, stem, partial(_push, outbox))


def _push(outbox: Outbox, path: Path) -> None:
    outbox.put_file(f"{contract.LOGS}/{path.name}", path)


class Board:
    """Scalars of rows: each number but the step and the time becomes a curve.

    TensorBoard reads the files of a folder in the order of their names, each to its end before the next. `push` copies
    a file to where it is read; without it the folder itself is read.
    """

    def __init__(self, folder: Path, stem: str, push: Push | None = None) -> None:
        self._folder, self._stem, self._push = folder, stem, push
        self._file: File | None = None
        self._number = 0
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
        if self._file and self._file.size > FILE_BYTES:
            self._end_file()
        if not self._file:
            self._file = File(self._folder / f"{self._stem}-{self._number:06d}")
            self._number += 1
        if not self._begun:
            self._file.write(_session(row))
            self._begun = True
        self._file.write(_event(row, values))

    def _copy(self) -> None:
        if self._file and self._file.flush() and self._push:
            self._push(self._file.path)

    def _end_file(self) -> None:
        """A copied file isn't needed here any more."""
        if self._file:
            self._copy()
            self._file.close()
            if self._push:
                self._file.path.unlink()
        self._file = None


class File:
    """One file of events."""

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.path = path
        self._file = path.open("xb")
        self._records = RecordWriter(self._file)
        self._flushed = 0
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    @property
    def size(self) -> int:
        return self._file.tell()

    def write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> bool:
        """Whether there was anything new."""
        new = self.size > self._flushed
        self._file.flush()
        self._flushed = self.size
        return new

    def close(self) -> None:
        self._file.close()


def _event(row: Mapping[str, Any], values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return Event(wall_time=row.get("time", time.time()), step=row["step"], summary=summary)


def _session(row: Mapping[str, Any]) -> Any:
    """The run goes on from here: TensorBoard forgets what an earlier start had drawn at this step and later ones."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    log = SessionLog(status=SessionLog.START)
    return Event(wall_time=row.get("time", time.time()), step=row["step"], session_log=log)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row draws: `train/loss` and so on for a step, `eval/loss` for an evaluation, nothing for other events."""
    if "step" not in row or row.get("event", "eval") != "eval":
        return {}
    group = row.get("event", "train")
    numbers = {key: value for key, value in row.items() if type(value) in (int, float)}
    numbers |= {key: float(text) for key, text in contract.nonfinite(row).items()}
    return {f"{group}/{key}": float(value) for key, value in numbers.items() if key not in ("step", "time")}
