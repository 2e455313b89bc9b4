"""Text as bytes: a file, a folder or Python's own standard library, memory-mapped; the last 10 % is held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from train.data.source import HELD_OUT_SHARE, TRAIN, Batch, draw
from train.errors import UsageError

STDLIB_CAP = 8 << 20
"""Bytes of python-stdlib that are used: plenty for a small model, and quick to prepare."""


@dataclass(frozen=True)
class Corpus:
    """One file of bytes, ready to be mapped. `held_out` is the offset at which the held-out part begins."""

    path: Path
    name: str
    files: int
    bytes: int
    held_out: int
    sha256: str
    unigram_entropy: float


class Text:
    """Windows of `block_size` bytes at random offsets; the targets are the same windows one byte on."""

    unit = "tokens"

    def __init__(self, corpus: Corpus, block_size: int, seed: int, batch_size: int, device: torch.device) -> None:
        self._seed, self._batch_size, self._device, self.per_sample = seed, batch_size, device, block_size
        needed = HELD_OUT_SHARE * (block_size + 1)
        if corpus.bytes < needed:
            raise UsageError(f"data: {corpus.name} has {corpus.bytes} bytes; block_size {block_size} needs {needed}")
        data = np.memmap(corpus.path, np.uint8, mode="r")
        self._train, self._held_out = data[: corpus.held_out], data[corpus.held_out :]
        self.unigram_entropy: float | None = corpus.unigram_entropy
        self.facts: dict[str, Any] = {
            "data": corpus.name,
            "data_files": corpus.files,
            "data_bytes": corpus.bytes,
            "data_held_out_bytes": corpus.bytes - corpus.held_out,
            "data_sha256": corpus.sha256,
        }

    def train(self, step: int, share: slice) -> Batch:
        starts = draw(self._seed, TRAIN, step, self._batch_size, len(self._train) - self.per_sample)
        return self._windows(self._train, starts[share])

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """Evenly spread over the whole part, so that each evaluation reads the same text."""
        last = len(self._held_out) - self.per_sample - 1
        starts = np.linspace(0, last, count * self._batch_size).astype(np.int64)
        return self._windows(self._held_out, starts[index * self._batch_size :][: self._batch_size][share])

    def _windows(self, data: NDArray[np.uint8], starts: NDArray[np.int64]) -> Batch:
        """uint8 travels to the device, and becomes int64 there."""
        rows = data[starts[:, None] + np.arange(self.per_sample + 1)]
        tokens = torch.from_numpy(rows).to(self._device, non_blocking=True).long()
        return tokens[:, :-1], tokens[:, 1:]


# --- Preparing ------------------------------------------------------------------------------------------------------


def prepare(data: str, cache: Path) -> Corpus:
    """The corpus that `data` names. A single file is mapped where it is; several become one file in the cache, named by
    its content, so that no two runs disturb each other. Raises UsageError if there is no text."""
    path, files = _source(data)
    if path.is_file():
        return _described(path, data, 1)
    return _described(_joined(files, cache), data, len(files))


def _source(data: str) -> tuple[Path, list[Path]]:
    """Where the text is, and its files in their order (none for a single file)."""
    if data == "python-stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        return root, stdlib_files(root)
    root = Path(data).expanduser()
    if root.is_file():
        return root, []
    if not root.is_dir():
        raise UsageError(f"data: there is no file or folder {data} on this machine")
    parts = sorted(path.relative_to(root).parts for path in root.rglob("*"))
    visible = (root.joinpath(*part) for part in parts if not any(name.startswith(".") for name in part))
    files = [path for path in visible if _is_text(path)]
    if not files:
        raise UsageError(f"data: the folder {data} holds no text files")
    return root, files


def stdlib_files(root: Path) -> list[Path]:
    """Python's source files, without tests, what was installed beside it, and tables made by programs.

    Ordered by a hash of their names, so that the held-out end is a fair sample of all, and cut at STDLIB_CAP bytes.
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
    """A file whose beginning is UTF-8 without NUL bytes. The last bytes may be half a character."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(8192)
    try:
        start[: -3 if len(start) == 8192 else None].decode()
    except UnicodeDecodeError as error:
        return error.start >= len(start) - 6 and len(start) == 8192
    return b"\0" not in start


def _joined(files: list[Path], cache: Path) -> Path:
    """All files, one after the other, in one file of the cache that appears whole or not at all."""
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=cache)
    try:
        with os.fdopen(handle, "wb") as joined:
            for path in files:
                content = path.read_bytes()
                digest.update(content)
                joined.write(content)
        return Path(name).replace(cache / f"{digest.hexdigest()}.bin")
    finally:
        Path(name).unlink(missing_ok=True)


def _described(path: Path, name: str, files: int) -> Corpus:
    """Sizes, digest and byte frequencies, read block by block: a corpus need not fit into memory."""
    size = path.stat().st_size
    held_out = size - size // HELD_OUT_SHARE
    digest, counts = hashlib.sha256(), np.zeros((2, 256), np.int64)
    with path.open("rb") as file:
        for part, length in enumerate((held_out, size - held_out)):
            for block in _blocks(file, length):
                digest.update(block)
                counts[part] += np.bincount(np.frombuffer(block, np.uint8), minlength=256)
    return Corpus(path, name, files, size, held_out, digest.hexdigest(), unigram_entropy(counts[0], counts[1]))


def _blocks(file: Any, length: int) -> Iterator[bytes]:
    while length > 0 and (block := file.read(min(length, 1 << 20))):
        length -= len(block)
        yield block


def unigram_entropy(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> float:
    """Nats per byte of text with the counts `held_out`, coded by the frequencies of `train` (256 counts each).

    One is added to each count of `train`: a byte it never saw costs much, but not infinitely much.
    """
    likely = np.log((train + 1) / (train.sum() + 256))
    return float(-(held_out * likely).sum() / max(1, held_out.sum()))


def cache_folder() -> Path:
    """Where prepared data is kept: $XDG_CACHE_HOME or ~/.cache, or the temporary folder if there is no home to use."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    folder = base / "launch" / "data"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"
    return folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir()) / f"launch-data-{os.getuid()}"
