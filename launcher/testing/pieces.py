"""Bytes in several buffers, so that gigabytes are stored, composed and sent without a copy."""

from __future__ import annotations

import base64
import hashlib
from itertools import accumulate

import google_crc32c

Pieces = tuple[bytes | memoryview, ...]
"""A sequence of bytes, in the order of its buffers."""


def size(pieces: Pieces) -> int:
    return sum(len(piece) for piece in pieces)


def cut(pieces: Pieces, first: int, end: int) -> Pieces:
    """Return the bytes from `first` up to `end` (exclusive), as views."""
    starts = accumulate((len(piece) for piece in pieces), initial=0)
    return tuple(
        memoryview(piece)[max(first - start, 0) : end - start]
        for start, piece in zip(starts, pieces, strict=False)
        if start < end and first < start + len(piece)
    )


def flip(pieces: Pieces, at: int, bits: int = 1) -> Pieces:
    """Return the bytes with some bits of byte `at` flipped."""
    wrong = bytes([bytes(join(cut(pieces, at, at + 1)))[0] ^ bits])
    return (*cut(pieces, 0, at), wrong, *cut(pieces, at + 1, size(pieces)))


def join(pieces: Pieces) -> bytes:
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], bytes) else b"".join(pieces)


def crc32c(pieces: Pieces) -> int:
    value = 0
    for piece in pieces:
        value = google_crc32c.extend(value, bytes(piece))  # bytes() of a bytes object makes no copy
    return value


def md5(pieces: Pieces) -> str:
    """Return the MD5 digest in base64."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()
