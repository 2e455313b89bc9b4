"""The run folder as one seam: a local folder or a folder of a Cloud Storage bucket, with the same few verbs.

Names are relative, with `/` between parts. A write is whole or absent: nobody ever reads half an object. Any number of
threads may use one Storage at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from launch_train.common.errors import OutputError
from launch_train.common.storage.bucket import GcsFolder
from launch_train.common.storage.local import LocalFolder
from launch_train.common.storage.names import Buffer, variant
from launch_train.common.storage.retry import UnreachableError

__all__ = [
    "Buffer",
    "GcsFolder",
    "LocalFolder",
    "OutputError",
    "Storage",
    "UnreachableError",
    "open_storage",
    "store",
]


class Storage(Protocol):
    """A folder that holds named objects. All verbs raise OutputError where the folder can't be used, and its kind
    UnreachableError where trying again later may help."""

    url: str

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        """Store `data`, replacing what was there, and return the object's version. With `create`, raise
        FileExistsError if the name is taken. `crc32c` is its `checksum`, from who has it already.

        A create or swap whose answer was lost is recognised by its content: what is created or swapped in must
        differ from all that others write under the name (hold an id of its writer).
        """

    def swap(self, name: str, data: bytes, version: str) -> str:
        """Store `data` if the object's version is still `version` ("": it isn't there), and return its new version.
        Raise FileExistsError if it is another, or none."""

    def write_file(self, name: str, path: Path) -> None:
        """Store the content of a local file, replacing what was there, in constant memory."""

    def read(self, name: str) -> bytes:
        """The content. Raises FileNotFoundError."""

    def read_version(self, name: str) -> tuple[bytes, str]:
        """The content and its version, for `swap`. Raises FileNotFoundError."""

    def written(self, name: str) -> float:
        """When the object was written last: Unix seconds by the clock of whoever stores it. Raises
        FileNotFoundError."""

    def list(self, prefix: str = "") -> list[str]:
        """The names that start with `prefix`, sorted."""

    def delete(self, name: str) -> None:
        """Remove an object; one that isn't there is fine."""

    def within(self, seconds: float) -> Storage:
        """The same folder; each call gives up after so many seconds in all."""

    def soft_delete_days(self) -> float:
        """For how long deleted objects stay and are billed. 0: not at all, or that can't be known."""


def open_storage(url: str) -> Storage:
    """The folder at `url`: gs://bucket/path or a local path (also file:///path). Raises OutputError."""
    if url.startswith("gs://"):
        return GcsFolder(url)
    if "://" in url and not url.startswith("file://"):
        raise OutputError(f"{url} is neither gs://BUCKET/PATH nor a local folder")
    return LocalFolder(Path(url.removeprefix("file://")))


def store(storage: Storage, name: str, data: bytes) -> str:
    """Create an object that must not be lost: where the name is taken by other content, under its next free variant.
    Where it already holds `data`, that is it. Returns the name under which the data lies."""
    number, free = 0, name
    while True:
        try:
            storage.write(free, data, create=True)
        except FileExistsError:
            if _holds(storage, free, data):
                return free
            number += 1
            free = variant(name, number)
        else:
            return free


def _holds(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.read(name) == data
    except FileNotFoundError:  # deleted in between: the next variant will do
        return False
