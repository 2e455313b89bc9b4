"""Read and upload the TensorBoard event files of a script while they grow. TensorBoard itself may not be installed.

A file is a sequence of records: the length (8 bytes), its checksum (4), the data, its checksum (4). The data is a
protobuf message `Event` (tensorboard/compat/proto: event.proto, summary.proto, tensor.proto), of which only the fields
of scalars are read.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.telemetry.upload_queue import Outbox

READ_BYTES: Final = 1 << 20
"""Bytes of a file that one call reads. A larger record is skipped: it holds images or audio."""

LEAST_SECONDS: Final = 10.0
"""Shortest time between two uploads of a file. It is uploaded whole, so a larger one waits longer."""

BYTES_PER_SECOND: Final = 1 << 20
"""Mean upload rate that a growing file may cause."""

RESERVED: Final = frozenset({"step", "time", "event", "nonfinite"})
"""Keys of a row that are no values."""


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
            is_early = not last and time.monotonic() < self._due.get(path, 0.0)
            if is_early or (self.logs and path.is_relative_to(self.logs)):
                continue
            try:
                status = path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if state != self._sent.get(path) and path.is_file():
                    name = path.relative_to(self.folder).as_posix().replace("\\", "_")
                    self.outbox.put_file(f"{runfolder.LOGS}/script/{name}", path)
                    self._sent[path] = state
                    self._due[path] = time.monotonic() + max(LEAST_SECONDS, status.st_size / BYTES_PER_SECOND)
            except (FileNotFoundError, OutputError):
                if path.exists():
                    raise  # else the script has deleted it


# --- Scalars ----------------------------------------------------------------------------------------------------------


class Scalar(NamedTuple):
    """One value; `time` in Unix seconds."""

    step: int
    time: float
    name: str
    value: float


@dataclass
class EventScalars:
    """The scalars in the event files below `folder`.

    Files that were last written before `since` (Unix seconds) are an earlier start's: only what is appended counts.
    """

    folder: Path
    since: float
    initial: dict[str, Scalar] = field(default_factory=dict)
    """The values at step 0 of tags that have no later one, such as hyperparameters. As rows they would show a resumed
    run as started from scratch."""
    is_behind: bool = False
    """The last call of `read` left something unread in a file."""
    _positions: dict[Path, int] = field(default_factory=dict)
    _top: Path | None = None
    """The folder of this start's first file. Others are named relative to it if they are below it, as those of
    `add_scalars` are: a name must not contain the time in the folder's."""
    _names: dict[tuple[Path, str], str] = field(default_factory=dict)

    def read(self, paths: Iterable[Path]) -> Iterator[Scalar]:
        """Yield the new scalars of the files, file by file. A damaged file is reported once, and not read further."""
        self.is_behind = False
        for path in paths:
            try:
                status = path.stat()
                position = self._positions.setdefault(path, status.st_size if status.st_mtime < self.since else 0)
                with path.open("rb") as file:
                    file.seek(position)
                    data = file.read(READ_BYTES)
            except (OSError, ValueError, OverflowError):  # deleted meanwhile, a folder, or a position beyond all files
                continue
            if status.st_mtime >= self.since:
                self._top = self._top or path.parent
            try:
                for end, event in event_records(data):
                    self._positions[path] = position + end
                    for scalar in event_values(event):
                        yield from self._of_row(path.parent, scalar)
            except ValueError as error:
                self._positions[path] = 1 << 62
                say(f"warning: {path}: {error}; the rest of this file gives no metrics")
            self.is_behind = self.is_behind or position < self._positions[path] < status.st_size

    def _of_row(self, folder: Path, scalar: Scalar) -> Iterator[Scalar]:
        """Yield a scalar under its name in a row, after the one of step 0 that waited for it.

        The name is the tag without `train/`, as launch's own event files add that. If another tag of the folder has
        the name, it is the whole tag; if one of another folder has it, the name follows that of the folder.
        """
        if scalar.step < 0:
            return
        key = folder, scalar.name
        if key not in self._names:
            tops = (self._top or self.folder, self.folder)
            above = next((top for top in tops if top in folder.parents), folder.parent)
            prefix, short = f"{folder.relative_to(above).as_posix()}/", scalar.name.removeprefix("train/")
            is_own = any(name == short and where == folder for (where, _), name in self._names.items())
            candidates = (short, scalar.name if is_own else short, prefix + short)
            taken = RESERVED.union(self._names.values())
            self._names[key] = next((name for name in candidates if name not in taken), prefix + scalar.name)
        scalar = scalar._replace(name=self._names[key])
        if scalar.step == 0:
            self.initial[scalar.name] = scalar
            return
        if first := self.initial.pop(scalar.name, None):
            yield first
        yield scalar


def event_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the complete records, and where each ends; one that is larger than READ_BYTES is empty.

    Raises ValueError: a checksum is wrong.
    """
    try:
        import google_crc32c
    except ImportError:  # in another environment's Python (launch local --python)
        google_crc32c = None  # type: ignore[assignment]  # records are read without a check

    def check(content: bytes, masked: int) -> None:
        if google_crc32c and mask_crc(google_crc32c.value(content)) != masked:
            raise ValueError("a record's checksum is wrong")

    at = 0
    while len(data) >= at + 12:
        length, masked = struct.unpack_from("<QI", data, at)
        check(data[at : at + 8], masked)
        end = at + 12 + length + 4
        if end - at > READ_BYTES:
            yield end, b""
        elif end > len(data):  # it is being written, or READ_BYTES cut it
            return
        else:
            event = data[at + 12 : end - 4]
            check(event, struct.unpack_from("<I", data, end - 4)[0])
            yield end, event
        at = end


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as it stands in a record (tensorflow/core/lib/hash/crc32c.h)."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def event_values(event: bytes) -> Iterator[Scalar]:
    """Yield the scalars of an `Event`: simple values, and tensors without dimensions (TensorFlow 2, Keras)."""
    try:
        parts = dict(proto_fields(event))
        (time,) = struct.unpack("<d", parts[1])
        for number, summary in proto_fields(parts.get(5, b"")):
            value = dict(proto_fields(summary)) if number == 1 else {}
            amount = (
                struct.unpack("<f", value[2])[0] if 2 in value else tensor_value(dict(proto_fields(value.get(8, b""))))
            )
            if amount is not None:
                yield Scalar(parts.get(2, 0) - (parts.get(2, 0) >> 63 << 64), time, value[1].decode(), amount)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, struct.error):
        return  # another message


def tensor_value(tensor: dict[int, Any]) -> float | None:
    """Return the value of a `TensorProto` that is a number without dimensions; None for any other one."""
    layout, values = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10)}.get(tensor.get(1, 0), ("", 0))
    if not layout or tensor.get(2):
        return None
    content = tensor.get(4) or tensor.get(values, 0)
    if values > 6 and not tensor.get(4):
        number = varint(content, 0)[0] if isinstance(content, bytes) else content
        return float(number - (number >> 63 << 64))
    return float(struct.unpack(layout, content)[0]) if content else 0.0


def proto_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each field of a protobuf message: an int for a varint, else bytes."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        if tag & 7 == 0:
            value, at = varint(message, at)
            yield tag >> 3, value
        else:
            size, at = varint(message, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            yield tag >> 3, message[at : at + size]
            at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the whole number at a position, and the position after it."""
    number = shift = 0
    while (byte := message[at]) & 128:
        number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
    return number | byte << shift, at + 1
