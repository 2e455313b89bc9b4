"""Files of fixed-width tokens for memory mapping, their statistics, and the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from launch_train.common.errors import UnfitError, UsageError
from launch_train.common.storage.local import explain_disk_error
from launch_train.data.source import HELD_OUT_SHARE

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

BLOCK = 1 << 20

PRETOKENISED = "none (the files hold tokens)"
"""The tokenizer of a corpus of tokens that another program has written."""

REPORT_SECONDS = 10.0
"""Seconds between two progress lines."""

COUNTED = 1 << 28
"""Tokens of each part that the unigram baseline of separate parts is computed from: about a second."""


@dataclass(frozen=True)
class Shard:
    """Consecutive tokens of one file: `length` of them, after `offset` bytes."""

    path: Path
    length: int
    dtype: str = "uint8"
    offset: int = 0

    def tokens(self) -> NDArray[Any]:
        """Map the tokens into memory. They must not be empty."""
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.length,))

    def blocks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the tokens in blocks, each with its place: they may be more than fit into memory."""
        tokens = self.tokens() if self.length else np.empty(0)
        for start in range(0, self.length, BLOCK):
            yield start, tokens[start : start + BLOCK]


@dataclass(frozen=True)
class Corpus:
    """Tokens, which may be bytes, in one or several files.

    `held_out` are the shards of separate validation data; if there are none, the last tenth of `shards` is held out.
    `bytes` is the size of the text, `mask` the mask token (it may be the first one beyond the vocabulary), `end` the
    token after each document.
    """

    shards: tuple[Shard, ...]
    name: str
    files: int
    bytes: int
    sha256: str
    unigram_entropy: float
    held_out: tuple[Shard, ...] = ()
    unit: str = "byte"
    tokenizer: str = "bytes"
    vocab_size: int = 256
    mask: int = 256
    end: int | None = None

    @property
    def length(self) -> int:
        return count(self.shards) + count(self.held_out)

    def parts(self) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
        if self.held_out:
            return self.shards, self.held_out
        length = count(self.shards)
        return split(self.shards, length - length // HELD_OUT_SHARE)


def concatenate(parts: Sequence[Corpus]) -> Corpus:
    """Return a corpus of all parts, which have one tokenizer. A part alone is returned unchanged."""
    if len(parts) == 1:
        return parts[0]
    shards = tuple(shard for part in parts for shard in part.shards)
    length = count(shards)
    return replace(
        parts[0],
        shards=shards,
        files=sum(part.files for part in parts),
        bytes=sum(part.bytes for part in parts),
        sha256=hashlib.sha256(" ".join(part.sha256 for part in parts).encode()).hexdigest(),
        unigram_entropy=sampled_entropy(*split(shards, length - length // HELD_OUT_SHARE), parts[0].vocab_size),
    )


def join(train: Corpus, val: Corpus) -> Corpus:
    """Return a corpus that holds out `val`, all of it. Raises UsageError if one holds text and the other tokens."""
    if train.tokenizer != val.tokenizer:
        holds = (f"{part.name} {'tokens' if part.tokenizer == PRETOKENISED else 'text'}" for part in (train, val))
        raise UsageError(f"data: {' and '.join(holds)}: train and val must both hold text, or both tokens")
    vocab_size = max(train.vocab_size, val.vocab_size)
    return replace(
        train,
        held_out=(*val.shards, *val.held_out),
        name=f"{train.name}, val: {val.name}",
        files=train.files + val.files,
        bytes=train.bytes + val.bytes,
        sha256=hashlib.sha256(f"{train.sha256} {val.sha256}".encode()).hexdigest(),
        unigram_entropy=sampled_entropy(train.shards, val.shards, vocab_size),
        vocab_size=vocab_size,
        mask=vocab_size if train.tokenizer == PRETOKENISED else train.mask,
    )


def count(shards: Iterable[Shard]) -> int:
    return sum(shard.length for shard in shards)


def split(shards: Sequence[Shard], at: int) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Split shards after `at` tokens. A shard may be cut in two."""
    before, after = list[Shard](), list[Shard]()
    for shard in shards:
        kept = min(max(0, at), shard.length)
        if kept:
            before.append(replace(shard, length=kept))
        if kept < shard.length:
            skipped = kept * np.dtype(shard.dtype).itemsize
            after.append(replace(shard, length=shard.length - kept, offset=shard.offset + skipped))
        at -= shard.length
    return tuple(before), tuple(after)


class Windows:
    """All windows of `size` consecutive tokens, numbered shard by shard. No window spans two shards."""

    def __init__(self, shards: Iterable[Shard], size: int) -> None:
        usable = [shard for shard in shards if shard.length >= size]
        self._shards, self._size = [shard.tokens() for shard in usable], size
        self._ends = np.cumsum([shard.length - size + 1 for shard in usable], dtype=np.int64)
        common = np.result_type(np.uint8, *(np.dtype(shard.dtype).newbyteorder("=") for shard in usable))
        # uint64 and int64 have only float64 in common.
        self._dtype = common if common.kind in "iu" else np.dtype(np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Return the windows of these numbers, [len(numbers), size], in the shards' compact type."""
        rows = np.empty((len(numbers), self._size), self._dtype)
        places = np.searchsorted(self._ends, numbers, side="right")
        for place in np.unique(places):
            mine = places == place
            starts = numbers[mine] - (self._ends[place - 1] if place else 0)
            rows[mine] = self._shards[place][starts[:, None] + np.arange(self._size)]
        return rows


@dataclass(frozen=True)
class TokenStatistics:
    length: int
    held_out: int
    sha256: str
    unigram_entropy: float


def measured(path: Path, dtype: str = "uint8", vocab_size: int = 256) -> TokenStatistics:
    length = path.stat().st_size // np.dtype(dtype).itemsize
    digest, kept = hashlib.sha256(), length - length // HELD_OUT_SHARE
    train, held_out = (_counts(part, vocab_size, digest) for part in split([Shard(path, length, dtype)], kept))
    return TokenStatistics(length, kept, digest.hexdigest(), unigram_entropy(train, held_out))


def sampled_entropy(train: Sequence[Shard], held_out: Sequence[Shard], vocab_size: int) -> float:
    """Return the unigram entropy of separate parts, from at most the first COUNTED tokens of each."""
    return unigram_entropy(*(_counts(split(part, COUNTED)[0], vocab_size) for part in (train, held_out)))


def _counts(shards: Iterable[Shard], vocab_size: int, digest: Hash | None = None) -> NDArray[np.int64]:
    """Return how often each token occurs; add the tokens to the digest."""
    counts = np.zeros(vocab_size, np.int64)
    for shard in shards:
        for _, block in shard.blocks():
            counts += np.bincount(block.astype(np.int64), minlength=vocab_size)
            if digest is not None:
                digest.update(block.data)
    return counts


def unigram_entropy(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
    """Return the cross-entropy, in nats per token, of counts `held_out` under the frequencies of `train`.

    Both have one count per token of the vocabulary. One is added to each count of `train` (add-one smoothing), so that
    unseen tokens have a finite cost.
    """
    likely = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * likely).sum() / max(1, held_out.sum()))


class ProgressTimer:
    """Says when a line about the progress of long work is due: every REPORT_SECONDS, so never in short work."""

    def __init__(self) -> None:
        self._began = self._reported = time.monotonic()

    def due(self) -> float:
        """Return the seconds since the work began if a line is due, else 0."""
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS:
            return 0.0
        self._reported = now
        return now - self._began


# --- Cache ----------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Return the folder for prepared data: in $XDG_CACHE_HOME or ~/.cache, or a temporary one if not writable."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "launch" / "data"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"


def file_key(files: Iterable[Path], *more: object) -> str:
    """Return a name for what is computed from files, and cached: another one if a file changes, by its size or times.

    `more` (JSON) is what else the result depends on.
    """
    stats = [(str(path.resolve()), path.stat()) for path in files]
    rows = [(path, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for path, at in stats]
    return hashlib.sha256(json.dumps([rows, *more]).encode()).hexdigest()


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


@contextmanager
def written(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `target` when the context ends without an error. Raises UnfitError as `temporary`."""
    with temporary(target.parent) as (file, path):
        yield file
        file.flush()
        path.replace(target)


def unfit(error: OSError, path: Path) -> UnfitError:
    """Return the error for a disk that is full or not writable: another machine may work."""
    return UnfitError(f"data: {path.parent} can't be written: {explain_disk_error(error, path)}")
