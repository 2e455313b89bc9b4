"""Files of fixed-width tokens for memory mapping, their statistics, and the cache folder."""

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
    """One file of tokens, which may be bytes. `held_out` is the offset, in tokens, at which the held-out part begins.

    `bytes` is the size of the text, `length` its number of tokens, `mask` the mask token (it may be the first one
    beyond the vocabulary), `end` the token after each document.
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
    """Statistics of a file of tokens."""

    length: int
    held_out: int
    sha256: str
    unigram_entropy: float


def measured(path: Path, dtype: str = "uint8", vocab_size: int = 256) -> Measured:
    """Compute the statistics of a file of tokens, block by block: it may be larger than memory."""
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
    """Return the cross-entropy, in nats per token, of counts `held_out` under the frequencies of `train`.

    Both have one count per token of the vocabulary. One is added to each count of `train` (add-one smoothing), so that
    unseen tokens have a finite cost.
    """
    likely = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * likely).sum() / max(1, held_out.sum()))


# --- Cache ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder for prepared data: in $XDG_CACHE_HOME or ~/.cache, or a temporary one if not writable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = base / "launch" / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"


@contextmanager
def temporary(folder: Path) -> Iterator[tuple[IO[bytes], Path]]:
    """Open a temporary file in `folder`, for the caller to write and then rename: the target is complete or absent.

    If it isn't renamed, it is deleted on exit. Raises UnfitError if it can't be written.
    """
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
    """Return the error for a disk that is full or not writable: another machine may work."""
    return UnfitError(f"data: {path.parent} can't be written: {explain_disk_error(error, path)}")
