"""Text as a memory-mapped sequence of tokens whose last 10 % is held out. Also prepares text as bytes: a file, a folder
or Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data.files import PACKED, PackedError, find_files, opened, unpacked_name
from launch_train.data.records import are_records, documents, is_json_lines, is_table
from launch_train.data.sample_order import TRAIN, draw
from launch_train.data.source import HELD_OUT_SHARE, TokenRows
from launch_train.data.token_file import (
    BLOCK,
    Corpus,
    Shard,
    Windows,
    count,
    measured,
    temporary,
)

STDLIB_CAP = 8 << 20
"""Maximum bytes of python-stdlib: enough for a small model, and fast to prepare."""


class Text(TokenRows):
    """Windows of `block_size` tokens at random offsets."""

    def __init__(self, corpus: Corpus, block_size: int, seed: int, batch_size: int, device: torch.device) -> None:
        self._seed, self._batch_size, self.device, self.per_sample = seed, batch_size, device, block_size
        train, held_out = corpus.parts()
        self._train, self._held_out = Windows(train, block_size + 1), Windows(held_out, block_size + 1)
        _check_length(corpus, block_size, has_windows=bool(self._train) and bool(self._held_out))
        self.unigram_entropy, self.vocab_size = corpus.unigram_entropy, corpus.vocab_size
        self.mask, self.end = corpus.mask, corpus.end
        self.facts = {
            "data": corpus.name,
            "data_files": corpus.files,
            "data_bytes": corpus.bytes,
            "data_unit": corpus.unit,
            "data_sha256": corpus.sha256,
        }
        if corpus.unit == "byte":
            self.facts["data_held_out_bytes"] = count(held_out)
        else:
            self.facts |= {"tokenizer": corpus.tokenizer, "data_tokens": corpus.length}
            self.facts["data_held_out_tokens"] = count(held_out)

    def drawn(self, step: int) -> list[int]:
        return [int(start) for start in self._windows(step)]

    def train_rows(self, step: int, share: slice) -> NDArray[Any]:
        return self._train.rows(self._windows(step)[share])

    def held_out_rows(self, index: int, count: int, share: slice) -> NDArray[Any]:
        """Return windows spread evenly over the held-out part, so that each evaluation reads the same text."""
        starts = np.linspace(0, len(self._held_out) - 1, count * self._batch_size).astype(np.int64)
        return self._held_out.rows(starts[index * self._batch_size :][: self._batch_size][share])

    def _windows(self, step: int) -> NDArray[np.int64]:
        return draw(self._seed, TRAIN, step, self._batch_size, len(self._train))


def _check_length(corpus: Corpus, block_size: int, *, has_windows: bool) -> None:
    """Raise UsageError if there is no window to train on, or none to evaluate."""
    needed = block_size + 1
    for which, shards in (("training", corpus.shards), ("validation", corpus.held_out)) if corpus.held_out else ():
        if (longest := max(shard.length for shard in shards)) < needed:
            has = f"{corpus.name}: the longest {which} file has {longest} {corpus.unit}s"
            raise UsageError(f"data: {has}; block_size {block_size} needs {needed}")
    if not corpus.held_out and (corpus.length < HELD_OUT_SHARE * needed or not has_windows):
        has = f"{corpus.name} has {corpus.length} {corpus.unit}s" + f" in {corpus.files} files" * (
            len(corpus.shards) > 1
        )
        raise UsageError(f"data: {has}; block_size {block_size} needs {HELD_OUT_SHARE * needed}")


# --- Preparing ------------------------------------------------------------------------------------------------------


def corpus_of_bytes(
    files: list[Path], cache: Path, name: str, column: str = "text", *, in_place: bool = False
) -> Corpus:
    """Prepare text files as a corpus of bytes, named `name`.

    A single plain file is mapped `in_place`. Several files, a compressed one, JSON Lines and tables are joined into one
    cache file named by its digest, so that concurrent runs don't conflict. A line feed follows each record.
    """
    plain = in_place and files[0].suffix.lower() not in PACKED and not are_records(files[0])
    path = files[0] if plain else _joined(files, cache, column)
    statistics = measured(path)
    size = statistics.length
    return Corpus((Shard(path, size),), name, len(files), size, statistics.sha256, statistics.unigram_entropy)


def files_of(data: str) -> list[Path]:
    """Return the text files of a file, folder or glob, sorted by path. Raises UsageError if there are none."""
    if data == "python-stdlib":
        return stdlib_files(Path(sysconfig.get_paths()["stdlib"]))
    files = find_files(data)
    if files is None:
        raise UsageError(f"data: {data} does not exist on this machine")
    if files == [Path(data).expanduser()]:
        if (name := unpacked_name(files[0])).endswith(".json"):  # training on its syntax is surely a mistake
            raise UsageError(
                f'data: {files[0]} is JSON; records are read from .jsonl, one {{"text": …}} a line. For an array: '
                f"jq -c '.[]' {files[0].name} > {name.removesuffix('.json')}.jsonl"
            )
        return files
    if tables := [path for path in files if is_table(path)]:
        return tables  # beside them are the metadata of a dataset, and its README
    if texts := [path for path in files if _is_text(path)]:
        return texts
    raise UsageError(f"data: the folder {data} holds no text files")


def stdlib_files(root: Path) -> list[Path]:
    """Return Python's source files, without tests, installed packages and generated tables.

    Sorted by a hash of their names, so that the held-out end is a representative sample; at most STDLIB_CAP bytes.
    """
    files = list[tuple[bytes, Path]]()
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]  # site-packages may hold 100,000 files
        sources = (Path(folder, name) for name in names if name.endswith(".py"))
        files += [(hashlib.sha256(path.relative_to(root).as_posix().encode()).digest(), path) for path in sources]
    paths = [path for _, path in sorted(files)]
    sizes = accumulate(path.stat().st_size for path in paths)
    return [path for path, size in zip(paths, sizes, strict=True) if size <= STDLIB_CAP]


_EXCLUDED = frozenset({"test", "tests", "idlelib", "site-packages", "encodings", "pydoc_data"})


def _is_text(path: Path) -> bool:
    """Return whether the file starts with UTF-8 text without NUL bytes. Only the first 8192 bytes are read; the last of
    them may be part of a character. JSON Lines always count: reading them reports errors with the line number."""
    if is_json_lines(path):
        return True
    try:
        with opened(path) as file:
            start = file.read(8192)
        start[: -3 if len(start) == 8192 else None].decode()
    except UnicodeDecodeError as error:
        return error.start >= len(start) - 6 and len(start) == 8192
    except PackedError:
        return False
    return b"\0" not in start


def _joined(files: list[Path], cache: Path, column: str) -> Path:
    digest = hashlib.sha256()
    with temporary(cache) as (joined, path):
        for each in files:
            for content in _content(each, column):
                digest.update(content)
                joined.write(content)
        joined.flush()
        return path.replace(cache / f"{digest.hexdigest()}.bin")


def _content(path: Path, column: str) -> Iterator[bytes]:
    if are_records(path):
        yield from (f"{text}\n".encode() for text in documents(path, column) if text)
        return
    with opened(path) as file:
        while block := file.read(BLOCK):
            yield block
