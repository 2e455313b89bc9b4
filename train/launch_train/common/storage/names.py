"""Names in a run folder, and what can be stored under them."""

from __future__ import annotations

from pathlib import PurePosixPath

Buffer = bytes | bytearray | memoryview
"""What can be stored: a memoryview may be of any contiguous kind."""


def checked(name: str) -> str:
    """`name`, if it stays in the folder. Raises ValueError: names are ours, so a bad one is a fault in the code."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is no name in a run folder")
    return name


def variant(name: str, number: int) -> str:
    """Another name for what belongs under `name`, sorted beside it: a/b.jsonl, 1 -> a/b-1.jsonl."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def as_bytes(data: Buffer) -> memoryview:
    """The bytes of `data`, not copied."""
    return memoryview(data).cast("B")
