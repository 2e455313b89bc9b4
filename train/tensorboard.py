"""TensorBoard's events of a run, in its folder `logs/`. Optional: without the package there are none.

Events are appended to a file, and objects of a bucket can't be appended to: for a bucket they are written locally and
copied whole. TensorBoard's own writer is used rather than torch's, so that a script without torch needs none.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train import contract
from train.storage import LocalFolder, Storage

COPY_SECONDS = 60.0
"""Between two copies to a bucket: each sends the whole file."""


def open_board(storage: Storage) -> Board | None:
    """A board in the run folder, or None, with a line that says so, if TensorBoard is not installed or can't work."""
    try:
        return _opened(storage)
    except ImportError:
        print("TensorBoard is not installed: no events are written", file=sys.stderr, flush=True)
    except Exception as error:  # noqa: BLE001 - it is an extra: no trouble of it may end a run
        print(f"no TensorBoard events are written: {error}", file=sys.stderr, flush=True)
    return None


def _opened(storage: Storage) -> Board:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if isinstance(storage, LocalFolder):
        return Board(EventFileWriter(str(storage.folder / contract.LOGS)))
    folder = Path(tempfile.mkdtemp(prefix="launch-logs-"))
    return Board(EventFileWriter(str(folder)), storage, folder)


class Board:
    """Scalars of rows: each number but the step and the time becomes a curve."""

    def __init__(self, writer: Any, storage: Storage | None = None, folder: Path | None = None) -> None:
        self._writer, self._storage, self._folder = writer, storage, folder
        self._copied = time.monotonic()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if values := scalars(row):
                self._writer.add_event(_event(row, values))
        self._writer.flush()
        if time.monotonic() - self._copied >= COPY_SECONDS:
            self._copy()

    def close(self) -> None:
        self._writer.close()
        self._copy()

    def _copy(self) -> None:
        if self._storage and self._folder:
            for path in sorted(self._folder.iterdir()):
                self._storage.write_file(f"{contract.LOGS}/{path.name}", path)
        self._copied = time.monotonic()


def _event(row: Mapping[str, Any], values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
    return Event(wall_time=row.get("time", time.time()), step=row["step"], summary=summary)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """What a row draws: `train/loss` and so on for a step, `eval/loss` for an evaluation, nothing for other events."""
    if "step" not in row or row.get("event", "eval") != "eval":
        return {}
    group = row.get("event", "train")
    numbers = {key: value for key, value in row.items() if type(value) in (int, float)}
    return {f"{group}/{key}": float(value) for key, value in numbers.items() if key not in ("step", "time")}
