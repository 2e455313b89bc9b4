"""Write an image layer: a compressed tar with its two digests (OCI image specification, image layout and config)."""

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
"""gzip's default level. On source code, level 9 takes a third longer and saves one percent."""


class Layer(NamedTuple):
    """A layer on this machine's disk."""

    path: Path
    digest: str
    """`sha256:…` of the compressed bytes, which identifies the layer in a registry."""
    diff_id: str
    """`sha256:…` of the uncompressed tar, which the image's config lists."""
    size: int
    """Compressed size in bytes."""
    made_by: str
    """Shown by `docker history`."""

    def open(self) -> BinaryIO:
        """Open the compressed bytes for reading."""
        return self.path.open("rb")


class HashingWriter:
    """A stream that passes all data on, and computes its digest and length."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Pass some bytes on."""
        self._hash.update(data)
        self.size += len(data)
        self._write(data)
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    @property
    def digest(self) -> str:
        """Return `sha256:…` of the bytes written so far."""
        return f"sha256:{self._hash.hexdigest()}"


def layer(trees: Sequence[Tree], path: Path, made_by: str) -> Layer:
    """Write the trees to `path` as a layer. The same files give the same bytes, given the same zlib.

    Raises:
        UsageError: a file can't be read.
        LaunchError: the layer can't be written, or the files have changed since they were hashed.
    """
    with path.open("wb", buffering=0) as file:
        packed = HashingWriter(lambda data: written(file, data))
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=as_file(packed), mtime=0) as zipped:
            plain = HashingWriter(zipped.write)
            reproducible_tar.write(trees, as_file(plain))
    return Layer(path, packed.digest, plain.digest, packed.size, made_by)


def written(file: RawIOBase, data: bytes) -> None:
    """Write all data. Raises LaunchError, because callers take an OSError for an unreadable source file."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        folder = Path(str(getattr(file, "name", ""))).parent
        raise LaunchError(
            f"a layer can't be written to {folder}: {error.strerror}",
            "Nothing was uploaded. Free space there, or use another folder: TMPDIR=DIR",
        ) from error


def as_file(stream: HashingWriter) -> IO[bytes]:
    """Return the stream typed as a file, for gzip and tarfile."""
    return stream  # type: ignore[return-value]  # typing.IO has twenty methods, of which two are called
