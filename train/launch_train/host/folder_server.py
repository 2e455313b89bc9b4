"""Serve a local folder as a Storage over a pair of pipes, mostly those of an SSH connection.

Each message is a line of JSON with the length of the bytes that follow it. A request names a method of Storage, its
arguments and `bytes`; an answer has `value`, or `error` (exists, missing, foreign, unusable) with its text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from launch_train.common.errors import OutputError
from launch_train.common.storage.local import ForeignFileError, LocalFolder

MARK: Final = b"\x02launch\x02\n"
"""Precedes everything that launch reads from a host: a login shell may print a text of its own before."""
NO_SLURM: Final = 96
"""Exit code of launch_train.host if Slurm does not answer."""


def serve(folder: Path, reader: IO[bytes], writer: IO[bytes]) -> None:
    """Answer requests until the reader ends."""
    storage = LocalFolder(folder)
    send(writer, {"value": storage.url}, mark=MARK)
    while request := receive(reader):
        answer, body = answered(storage, *request)
        send(writer, answer, body)


def answered(storage: LocalFolder, request: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Carry out a request; return the answer and its bytes."""
    name = str(request.get("name", ""))
    calls: dict[str, Callable[[], Any]] = {
        "write": lambda: storage.write(name, data, create=bool(request.get("create"))),
        "swap": lambda: storage.swap(name, data, str(request["version"])),
        "read": lambda: storage.read(name),
        "read_version": lambda: storage.read_version(name),
        "written": lambda: storage.written(name),
        "list": lambda: storage.list(name),
        "delete": lambda: storage.delete(name),
    }
    try:
        value = calls[request["method"]]()
    except (OutputError, OSError, KeyError, ValueError) as error:
        kinds = {FileExistsError: "exists", FileNotFoundError: "missing", ForeignFileError: "foreign"}
        return {"error": kinds.get(type(error), "unusable"), "text": str(error)}, b""
    match value:
        case bytes():
            return {"value": None}, value
        case (bytes() as content, version):
            return {"value": version}, content
    return {"value": value}, b""


def send(writer: IO[bytes], message: Mapping[str, Any], data: bytes = b"", mark: bytes = b"") -> None:
    writer.write(mark + json.dumps({**message, "bytes": len(data)}).encode() + b"\n" + data)
    writer.flush()


def receive(reader: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read one message with its bytes; None: the other side has ended. Raises ValueError: it is malformed."""
    line = reader.readline()
    if not line.endswith(b"\n"):
        return None
    message: dict[str, Any] = json.loads(line)
    size = int(message["bytes"])
    data = reader.read(size)
    return (message, data) if len(data) == size else None
