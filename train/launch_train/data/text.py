"""Text as a memory-mapped sequence of tokens whose last 10 % is held out. Also prepares text as bytes: a file, a folder
or Python's standard library."""

from __future__ import annotations

import gzip
import hashlib
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data import jsonl
from launch_train.data.batch import to_tensor
from launch_train.data.jsonl import opened
from launch_train.data.source import HELD_OUT_SHARE, TRAIN, Batch, SourceDefaults, draw
from launch_train.data.token_file import Corpus, cache_folder, measured, temporary, unigram_entropy

__all__ = ["STDLIB_CAP", "Corpus", "Text", "cache_folder", "files_of", "opened", "prepare", "unigram_entropy"]

STDLIB_CAP = 8 << 20
"""Maximum bytes of python-stdlib: enough for a small model, and fast to prepare."""


class Text(SourceDefaults):
    """Windows of `block_size` tokens at random offsets. Targets are the windows shifted by one token."""

    def __init__(self, corpus: Corpus, block_size: int, seed: int, batch_size: int, device: torch.device) -> None:
        self._seed, self._batch_size, self._device, self.per_sample = seed, batch_size, device, block_size
        needed = HELD_OUT_SHARE * (block_size + 1)
        if corpus.length < needed:
            has = f"{corpus.name} has {corpus.length} {corpus.unit}s"
            raise UsageError(f"data: {has}; block_size {block_size} needs {needed}")
        data = corpus.tokens()
        self._train, self._held_out = data[: corpus.held_out], data[corpus.held_out :]
        self.unigram_entropy = corpus.unigram_entropy
        self.vocab_size = corpus.vocab_size
        self.mask, self.end = corpus.mask, corpus.end
        self.facts = _facts(corpus)

    def train(self, step: int, share: slice) -> Batch:
        return self._batch(self.train_rows(step, share))

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._batch(self.held_out_rows(index, count, share))

    def drawn(self, step: int) -> list[int]:
        """Return the offsets of the windows."""
        return [int(start) for start in self._starts(step)]

    def train_rows(self, step: int, share: slice) -> NDArray[Any]:
        """Return windows of block_size + 1 tokens."""
        return self._rows(self._train, self._starts(step)[share])

    def held_out_rows(self, index: int, count: int, share: slice) -> NDArray[Any]:
        """Return windows spread evenly over the held-out part, so that each evaluation reads the same text."""
        last = len(self._held_out) - self.per_sample - 1
        starts = np.linspace(0, last, count * self._batch_size).astype(np.int64)
        return self._rows(self._held_out, starts[index * self._batch_size :][: self._batch_size][share])

    def _starts(self, step: int) -> NDArray[np.int64]:
        return draw(self._seed, TRAIN, step, self._batch_size, len(self._train) - self.per_sample)

    def _rows(self, data: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[Any]:
        rows: NDArray[Any] = data[starts[:, None] + np.arange(self.per_sample + 1)]
        return rows

    def _batch(self, rows: NDArray[Any]) -> Batch:
        """Copy rows to the device in their compact type (1, 2 or 4 bytes per token), and convert to int64 there."""
        tokens = to_tensor(rows, self._device).long()
        return tokens[:, :-1], tokens[:, 1:]


def _facts(corpus: Corpus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "data": corpus.name,
        "data_files": corpus.files,
        "data_bytes": corpus.bytes,
        "data_unit": corpus.unit,
        "data_sha256": corpus.sha256,
    }
    held_out = corpus.length - corpus.held_out
    if corpus.unit == "byte":
        return facts | {"data_held_out_bytes": held_out}
    return facts | {"tokenizer": corpus.tokenizer, "data_tokens": corpus.length, "data_held_out_tokens": held_out}


# --- Preparing ------------------------------------------------------------------------------------------------------


def prepare(data: str, cache: Path, name: str = "") -> Corpus:
    """Prepare the text at `data` as a corpus of bytes, named `name`.

    A single plain file is mapped in place. Several files, a compressed one and JSON Lines are joined into one cache
    file named by its digest, so that concurrent runs don't conflict. A line feed follows each JSON record.

    Raises UsageError if there is no text.
    """
    files = files_of(data)
    single = len(files) == 1 and Path(data).expanduser().is_file() and files[0].suffix != ".gz"
    single = single and not jsonl.are_in(files[0])
    path = files[0] if single else _joined(files, cache)
    found = measured(path)
    size = found.length
    return Corpus(path, name or data, len(files), size, found.held_out, found.sha256, found.unigram_entropy, size)


def files_of(data: str) -> list[Path]:
    """Return the files of the text, sorted by path. Raises UsageError if there are none."""
    if data == "python-stdlib":
        return stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    root = Path(data).expanduser()
    if root.is_file():
        jsonl.refuse_json(root)
        return [root]
    if not root.is_dir():
        raise UsageError(f"data: there is no file or folder {data} on this machine")
    parts = sorted(path.relative_to(root).parts for path in root.rglob("*"))
    visible = (root.joinpath(*part) for part in parts if not any(name.startswith(".") for name in part))
    files = [path for path in visible if _is_text(path)]
    if not files:
        raise UsageError(f"data: the folder {data} holds no text files")
    return files


def stdlib_files(root: Path) -> list[Path]:
    """Return Python's source files, without tests, installed packages and generated tables.

    Sorted by a hash of their names, so that the held-out end is a representative sample; at most STDLIB_CAP bytes.
    """
    parts = ((path, path.relative_to(root)) for path in root.rglob("*.py"))
    files = [(_digest(name), path) for path, name in parts if not _LEFT_OUT.intersection(name.parts)]
    return list(_up_to(STDLIB_CAP, (path for _, path in sorted(files))))


_LEFT_OUT = frozenset({"test", "tests", "idlelib", "site-packages", "encodings", "pydoc_data"})


def _digest(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode()).digest()


def _up_to(cap: int, files: Iterable[Path]) -> Iterator[Path]:
    for path in files:
        cap -= path.stat().st_size
        if cap < 0:
            return
        yield path


def _is_text(path: Path) -> bool:
    """Return whether the file starts with UTF-8 text without NUL bytes. Only the first 8192 bytes are read; the last of
    them may be part of a character. JSON Lines always count: reading them reports errors with the line number."""
    if not path.is_file() or jsonl.are_in(path):
        return path.is_file()
    try:
        with opened(path) as file:
            start = file.read(8192)
        start[: -3 if len(start) == 8192 else None].decode()
    except UnicodeDecodeError as error:
        return error.start >= len(start) - 6 and len(start) == 8192
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False
    return b"\0" not in start


def _joined(files: list[Path], cache: Path) -> Path:
    """Concatenate all files into one cache file, atomically."""
    digest = hashlib.sha256()
    with temporary(cache) as (joined, path):
        for each in files:
            content = _content(each)
            digest.update(content)
            joined.write(content)
        joined.flush()
        return path.replace(cache / f"{digest.hexdigest()}.bin")


def _content(path: Path) -> bytes:
    if jsonl.are_in(path):
        return b"".join(f"{text}\n".encode() for text in jsonl.documents(path) if text)
    try:
        with opened(path) as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"data: {path} can't be unpacked: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UsageError:
    """Return the error for a data file that can't be read."""
    return UsageError(f"data: {path} can't be read: {error.strerror or error}")
