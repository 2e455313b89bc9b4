"""Content of uploads as Google's client reads it, with as few copies as possible."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import SEEK_SET
from typing import IO, Protocol

from launch_train.common.storage.names import Buffer, as_bytes

BLOCK = 1 << 20

CACHED = 1 << 17
"""Block size of checksums: google-crc32c needs a copy as bytes, which then stays in the CPU's cache."""

ONE_REQUEST = 8 << 20
"""Up to this size Google's client sends an object in one request, together with its metadata."""


class Stream(Protocol):
    """The file methods that an upload uses."""

    def read(self, size: int = -1, /) -> bytes | memoryview: ...

    def tell(self) -> int: ...


class Content(Protocol):
    """Content to upload, perhaps more than once."""

    size: int

    def stream(self) -> Stream:
        """Return the whole content as a stream."""

    def crc32c(self) -> str:
        """Return its CRC32C as in Cloud Storage: base64 of four bytes, big-endian."""


class Memory:
    """A buffer, which must not change before the upload has finished."""

    def __init__(self, data: Buffer, crc32c: str = "") -> None:
        self._view, self._sum = as_bytes(data), crc32c
        self.size = len(self._view)

    def stream(self) -> Stream:
        return _View(self._view)

    def crc32c(self) -> str:
        if not self._sum:
            self._sum = checksum(self._view)
        return self._sum


class _View:
    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes | memoryview:
        """Read up to `size` bytes. Content of a multipart request must be bytes; larger content needs no copy."""
        end = len(self._view) if size < 0 else min(self._at + size, len(self._view))
        piece, self._at = self._view[self._at : end], end
        return bytes(piece) if len(self._view) <= ONE_REQUEST else piece


class OnDisk:
    """The first `size` bytes of an open file, which may grow during the upload."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size

    def stream(self) -> Stream:
        self._file.seek(0, SEEK_SET)
        return self._file

    def crc32c(self) -> str:
        """Return the CRC32C, computed each time: a file that has changed must not fail forever."""
        self._file.seek(0, SEEK_SET)
        return _crc32c(self._blocks())

    def _blocks(self) -> Iterator[bytes]:
        left = self.size
        while block := self._file.read(min(BLOCK, left)):
            left -= len(block)
            yield block


def checksum(data: Buffer) -> str:
    """Return the CRC32C of a buffer as in Cloud Storage, computed in blocks that stay in the CPU's cache."""
    view = as_bytes(data)
    return _crc32c(bytes(view[at : at + CACHED]) for at in range(0, len(view), CACHED))


def _crc32c(blocks: Iterator[bytes]) -> str:
    import google_crc32c

    value = 0
    for block in blocks:
        value = google_crc32c.extend(value, block)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class Received:
    """Receives a download, which comes in one piece, without a copy."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(piece)
        return len(piece)

    @property
    def data(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
