"""A layer of an image: a compressed tar with its two digests (OCI image specification, image layout and config)."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Sequence
from io import RawIOBase
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from launcher.errors import LaunchError
from launcher.images import reproducible_tar
from launcher.images.reproducible_tar import Tree

LEVEL = 6
"""gzip's own default: on source code, 9 takes a third longer for one percent less."""


class Layer(NamedTuple):
    """A layer on this machine's disk."""

    path: Path
    digest: str
    """`sha256:…` of the compressed bytes, by which a registry knows it."""
    diff_id: str
    """`sha256:…` of the tar, which the image's config lists."""
    size: int
    """Compressed, in bytes."""
    made_by: str
    """Shown by `docker history`."""

    def open(self) -> BinaryIO:
        """Its bytes, from the start."""
        return self.path.open("rb")


class Hashing:
    """A stream that hands everything on, and knows the digest and the length of what came through."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Take some bytes."""
        self._hash.update(data)
        self.size += len(data)
        self._write(data)
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Nothing waits here."""

    @property
    def digest(self) -> str:
        """`sha256:…` so far."""
        return f"sha256:{self._hash.hexdigest()}"


def layer(trees: Sequence[Tree], path: Path, made_by: str) -> Layer:
    """Write the trees to `path` as a layer. The same files give the same bytes (with the same zlib).

    Raises:
        UsageError: a file can't be read.
        LaunchError: the layer can't be written, or the files have changed since they were hashed.
    """
    with path.open("wb", buffering=0) as file:
        packed = Hashing(lambda data: written(file, data))
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=as_file(packed), mtime=0) as zipped:
            plain = Hashing(zipped.write)
            reproducible_tar.write(trees, as_file(plain))
    return Layer(path, packed.digest, plain.digest, packed.size, made_by)


def written(file: RawIOBase, data: bytes) -> None:
    """Write all of it. Raises LaunchError; not OSError, which would look like a source that can't be read."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        folder = Path(str(getattr(file, "name", ""))).parent
        raise LaunchError(
            f"a layer can't be written to {folder}: {error.strerror}",
            "Nothing has been sent. Make room there, or name another folder: TMPDIR=DIR",
        ) from error


def as_file(stream: Hashing) -> IO[bytes]:
    """A stream for writing: gzip and tarfile need no more of a file than Hashing has."""
    return stream  # type: ignore[return-value]  # typing.IO has twenty methods, two of which are called
