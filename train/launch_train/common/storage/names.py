"""Names of objects in a run folder, and types of their content."""

from __future__ import annotations

from pathlib import PurePosixPath

Buffer = bytes | bytearray | memoryview
"""Content of an object: a memoryview may be of any contiguous type."""


def check_object_name(name: str) -> str:
    """Return `name`, if it stays in the folder. Raises ValueError: a bad name is an error in the code."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not a valid name in a run folder")
    return name


def variant(name: str, number: int) -> str:
    """Return another name for an object, which sorts beside `name`: a/b.jsonl, 1 -> a/b-1.jsonl."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def as_bytes(data: Buffer) -> memoryview:
    """Return the bytes of `data`, without a copy."""
    return memoryview(data).cast("B")
