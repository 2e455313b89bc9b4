"""Prepared text: one file of tokens of equal width, ready to be mapped, and where such files are kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from launch_train.common.errors import UnfitError
from launch_train.common.storage.local import explain_disk_error
from launch_train.data.source import HELD_OUT_SHARE

BLOCK = 1 << 20


@dataclass(frozen=True)
class Corpus:
    """One file of tokens; a byte is one, too. `held_out` is the offset, in tokens, at which the held-out part begins.

    `bytes` is the size of the text, `length` its tokens, `mask` the token that hides another (perhaps the first one
    beyond the vocabulary), `end` the one between documents.
    """

    path: Path
    name: str
    files: int
    bytes: int
    held_out: int
    sha256: str
    unigram_entropy: float
    length: int
    dtype: str = "uint8"
    unit: str = "byte"
    tokenizer: str = "bytes"
    vocab_size: int = 256
    mask: int = 256
    end: int | None = None

    def tokens(self) -> NDArray[Any]:
        return np.memmap(self.path, self.dtype, mode="r")


@dataclass(frozen=True)
class Measured:
    """What reading all of a file of tokens tells."""

    length: int
    held_out: int
    sha256: str
    unigram_entropy: float


def measured(path: Path, dtype: str = "uint8", vocab_size: int = 256) -> Measured:
    """Sizes, digest and frequencies, read block by block: a corpus need not fit into memory."""
    width = np.dtype(dtype).itemsize
    length = path.stat().st_size // width
    held_out = length - length // HELD_OUT_SHARE
    digest, counts = hashlib.sha256(), np.zeros((2, vocab_size), np.int64)
    with path.open("rb") as file:
        for part, tokens in enumerate((held_out, length - held_out)):
            for block in _blocks(file, tokens * width):
                digest.update(block)
                counts[part] += np.bincount(np.frombuffer(block, dtype), minlength=vocab_size)
    return Measured(length, held_out, digest.hexdigest(), unigram_entropy(counts[0], counts[1]))


def _blocks(file: Any, length: int) -> Iterator[bytes]:
    while length > 0 and (block := file.read(min(length, BLOCK))):
        length -= len(block)
        yield block


def unigram_entropy(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
    """Nats per token of text with the counts `held_out`, coded by the frequencies of `train` (as many counts each).

    One is added to each count of `train`: a token it never saw costs much, but not infinitely much.
    """
    likely = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * likely).sum() / max(1, held_out.sum()))


# --- Where it is kept -----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where prepared data is kept: $XDG_CACHE_HOME or ~/.cache, or the temporary folder if there is no home to use."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = base / "launch" / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"


@contextmanager
def temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """A file of `folder` to be written, and then renamed to what it is: it appears whole or not at all. What is still
    there at the end goes. Raises UnfitError where it can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    except OSError as error:
        raise unfit(error, folder) from error
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file, path
    except OSError as error:
        raise unfit(error, path) from error
    finally:
        path.unlink(missing_ok=True)


def unfit(error: OSError, path: Path) -> UnfitError:
    """The disk is full, or can't be written: another machine's may be."""
    return UnfitError(f"data: {path.parent} can't be written: {explain_disk_error(error, path)}")
