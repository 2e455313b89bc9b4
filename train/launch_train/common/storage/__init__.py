"""Storage of the run folder: a local folder or a folder of a Cloud Storage bucket, behind one protocol.

Names are relative, with `/` between parts. A write is atomic: nobody ever reads a partial object. A Storage is
thread-safe.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from launch_train.common.errors import OutputError
from launch_train.common.storage.bucket import GcsFolder
from launch_train.common.storage.local import LocalFolder
from launch_train.common.storage.memory import MemoryFolder
from launch_train.common.storage.names import Buffer, variant
from launch_train.common.storage.retry import UnreachableError

__all__ = [
    "Buffer",
    "GcsFolder",
    "LocalFolder",
    "MemoryFolder",
    "OutputError",
    "Storage",
    "UnreachableError",
    "create_variant",
    "open_storage",
]


class Storage(Protocol):
    """A folder of named objects. All methods raise OutputError if the folder can't be used, and its subclass
    UnreachableError if a retry may help."""

    url: str

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        """Store `data`, replacing an existing object, and return its version.

        With `create`, raise FileExistsError if the name is taken. `crc32c` is the `checksum` of `data`, if the caller
        has it. A create or swap whose answer was lost is recognised by its content, which must therefore differ from
        all that others write under the name (contain an id of its writer).
        """

    def swap(self, name: str, data: bytes, version: str) -> str:
        """Store `data` if the object's version is still `version` ("": it doesn't exist), and return its new version.
        Raise FileExistsError if the version differs."""

    def write_file(self, name: str, path: Path) -> None:
        """Store the content of a local file, replacing an existing object, in constant memory."""

    def read(self, name: str) -> bytes:
        """Return the content. Raises FileNotFoundError."""

    def read_version(self, name: str) -> tuple[bytes, str]:
        """Return the content and its version, for `swap`. Raises FileNotFoundError."""

    def written(self, name: str) -> float:
        """Return when the object was last written: Unix seconds by the storage's clock. Raises FileNotFoundError."""

    def list(self, prefix: str = "") -> list[str]:
        """Return the names that start with `prefix`, sorted."""

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""

    def within(self, seconds: float) -> Storage:
        """Return the same folder with a time limit for each call."""

    def soft_delete_days(self) -> float:
        """Return for how many days deleted objects are kept and billed; 0 if not at all, or if unknown."""


def open_storage(url: str) -> Storage:
    """Open the folder at `url`: gs://bucket/path or a local path (also file:///path). Raises OutputError."""
    if url.startswith("gs://"):
        return GcsFolder(url)
    if "://" in url and not url.startswith("file://"):
        raise OutputError(f"invalid run folder {url}: use gs://BUCKET/PATH or a local folder")
    return LocalFolder(Path(url.removeprefix("file://")))


def create_variant(storage: Storage, name: str, data: bytes) -> str:
    """Create an object that must not be lost, and return its name.

    If the name is taken by other content, the next free variant is used; if it already holds `data`, nothing is
    written.
    """
    number, free = 0, name
    while True:
        try:
            storage.write(free, data, create=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # deleted in between: the next variant will do
                if storage.read(free) == data:
                    return free
            number += 1
            free = variant(name, number)
        else:
            return free
