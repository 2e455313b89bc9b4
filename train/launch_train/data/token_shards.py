"""Read tokens that other programs have written: the .bin files of nanoGPT and llm.c, and .npy files of NumPy.

A .bin file of nanoGPT is uint16 without a header (data/openwebtext/prepare.py). One of llm.c has a header of 256 int32:
magic number, version and number of tokens (dev/data/data_common.py, commit f1e2ace).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from launch_train.common.cgroup import cores
from launch_train.common.errors import UsageError
from launch_train.data.files import find_files, split_by_name
from launch_train.data.records import holds_tokens, is_table, write_tokens
from launch_train.data.source import HELD_OUT_SHARE
from launch_train.data.token_file import PRETOKENISED, Corpus, Shard, count, file_key, sampled_entropy, split, written

SUFFIXES: Final = (".bin", ".npy")
HEADER: Final = 256 * 4
LLMC: Final = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""The type of llm.c's tokens, by magic number and version: of GPT-2 and of Llama 3."""
LLMC_EVAL: Final = 20240522
"""llm.c's magic number of multiple-choice tests."""
NUMPY: Final = b"\x93NUMPY"
NOT_TOKENS: Final = (b"PK\x03\x04", b"\x80\x02", b"\x1f\x8b")
"""First bytes of .bin files that hold no tokens: weights (torch.save's zip archives and pickles), and gzip."""
LARGEST: Final = 10_000_000
"""The largest vocabulary that a model may have (launch_train.common.config)."""


def holding(data: str, column: str = "text") -> Literal["no", "some", "only"]:
    """Return how many files of a file, folder or glob are shards of tokens, by their magic numbers or names."""
    are_shards = [_is_shard(file, column) for file in find_files(data) or ()]
    return "no" if not any(are_shards) else "only" if all(are_shards) else "some"


def corpus_of_shards(
    data: str, cache: Path, name: str, dtype: str | None = None, *, column: str = "text", by_name: bool = True
) -> Corpus:
    """Return the shards at `data` (a file, folder or glob) as a corpus. `dtype` is the type of headerless files.

    With `by_name`, shards of a folder or glob that are named so (`split_by_name`) are held out, otherwise the last
    tenth of the tokens. A table without the text `column` is a shard.

    Raises UsageError if a shard is empty, truncated or of another format.
    """
    files = find_files(data)
    if files is None:
        raise UsageError(f"data: {data} does not exist on this machine")
    token_files = [path for path in files if _is_shard(path, column)]
    if not token_files:
        raise UsageError(f"data: {data} holds no shards of tokens ({', '.join(SUFFIXES)})")
    if (count_of_tokens := len(token_files)) < len(files):
        print(f"data: {count_of_tokens} of {len(files)} files in {data} are shards of tokens; the others are not read")
    train, rest = split_by_name(token_files, data) if by_name else (token_files, [])
    shards, held = (
        [read_shard(write_tokens(path, cache) if is_table(path) else path, dtype) for path in part]
        for part in (train, rest)
    )
    examined = _examined(shards, held, cache)
    return Corpus(
        shards=tuple(shards),
        held_out=tuple(held),
        name=name,
        files=len(train) + len(rest),
        bytes=sum(path.stat().st_size for path in (*train, *rest)),
        sha256=examined.sha256,
        unigram_entropy=examined.unigram_entropy,
        unit="token",
        tokenizer=PRETOKENISED,
        vocab_size=examined.highest + 1,
        mask=examined.highest + 1,
    )


def require_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Raise UsageError with its file and position if a token is not in the model's vocabulary."""
    for shard in (*corpus.shards, *corpus.held_out):
        for start, block in shard.blocks():
            beyond = block >= vocab_size
            if beyond.any():
                at = start + int(beyond.argmax())
                raise UsageError(
                    f"data: {shard.path}: token {at:,} is {block[at - start]}; model.vocab_size is {vocab_size}: set "
                    f"it to {corpus.vocab_size} or more, or data.dtype if the file isn't {shard.dtype}"
                )


def _is_shard(path: Path, column: str) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError:
        start = b""
    is_named = path.suffix.lower() in SUFFIXES and not start.startswith(NOT_TOKENS)
    return is_named or start.startswith(NUMPY) or _magic(start) in LLMC or holds_tokens(path, column)


def _magic(start: bytes) -> tuple[int, int]:
    first, second = np.frombuffer(start[:8].ljust(8, b"\0"), "<i4")
    return int(first), int(second)


# --- One shard ------------------------------------------------------------------------------------------------------


def read_shard(path: Path, dtype: str | None = None) -> Shard:
    """Return the tokens of a file, by its header. `dtype` is the type of files without a header; default: uint16.

    Raises UsageError if the file is empty, truncated or of another format.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(HEADER)
    except OSError as error:
        raise UsageError(f"data: {path} can't be read: {error.strerror or error}") from error
    if not size:
        raise UsageError(f"data: {path} is empty: delete it, or copy it again")
    if start.startswith(NUMPY):
        return _numpy(path, size)
    if path.suffix.lower() == ".npy":
        raise UsageError(f"data: {path} is not a .npy file: it starts with {start[:6]!r}; write it with numpy.save")
    if _magic(start)[0] in (LLMC_EVAL, *(magic for magic, _ in LLMC)):
        return _llmc(path, start, size, dtype)
    return _raw(path, size, dtype)


def _numpy(path: Path, size: int) -> Shard:
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            offset = file.tell()
    except ValueError as error:
        raise UsageError(f"data: {path} is not a readable .npy file: {' '.join(str(error).split())}") from error
    if dtype.kind not in "iu":
        raise UsageError(f"data: {path} holds {dtype}, not integers: numpy.save(PATH, tokens.astype(numpy.uint16))")
    if len(shape) != 1:
        raise UsageError(f"data: {path} has the shape {shape}, not one dimension: numpy.save(PATH, tokens.ravel())")
    if not shape[0]:
        raise UsageError(f"data: {path} has no tokens: delete it")
    _require_size(path, shape[0], (size - offset) // dtype.itemsize)
    return Shard(path, shape[0], dtype.str, offset)


def _llmc(path: Path, start: bytes, size: int, dtype: str | None) -> Shard:
    magic, version = _magic(start)
    if magic == LLMC_EVAL:
        raise UsageError(f"data: {path} holds llm.c's multiple-choice questions, not text to train on")
    named = LLMC.get((magic, version))
    if named is None or len(start) < HEADER:
        what = f"version {version}" if len(start) == HEADER else "a header that is cut short"
        known = " and ".join(f"{magic} version {version}" for magic, version in LLMC)
        raise UsageError(f"data: {path} has llm.c's magic number {magic} with {what}; supported: {known}")
    if dtype not in (None, named):
        raise UsageError(f"data: {path} is {named} by its header, and data.dtype is {dtype}: remove data.dtype")
    length = int(np.frombuffer(start, "<i4")[2])
    if length <= 0:
        raise UsageError(f"data: {path} has no tokens: delete it")
    _require_size(path, length, (size - HEADER) // np.dtype(named).itemsize)
    return Shard(path, length, named, HEADER)


def _require_size(path: Path, promised: int, length: int) -> None:
    if length < promised:
        raise UsageError(
            f"data: {path} has {length:,} tokens, and its header says {promised:,}: it was cut short; copy it again"
        )


def _raw(path: Path, size: int, dtype: str | None) -> Shard:
    width = np.dtype(dtype or "uint16").itemsize
    if size % width:
        kind = f"{dtype or 'uint16'}, {width} bytes each"
        raise UsageError(
            f"data: {path} has {size:,} bytes, which is not a whole number of tokens ({kind}): it was cut short, or "
            "needs another data.dtype"
        )
    shard = Shard(path, size // width, dtype or "uint16")
    if dtype is None and shard.length % 2 == 0 and shard.length >= 64:
        start = np.asarray(shard.tokens()[: 1 << 16])
        if start[1::2].max() <= 3 < start[::2].max():  # the high halves of uint32 below 2**18 are at most 3
            raise UsageError(
                f"data: {path} has small numbers at every second place: it is uint32; set data.dtype: uint32"
            )
    return shard


# --- All shards -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Examined:
    sha256: str
    highest: int
    unigram_entropy: float


def _examined(shards: Sequence[Shard], held_out: Sequence[Shard], cache: Path) -> _Examined:
    """Read all tokens once, on all cores. The result is cached by the files' file_key."""
    every = (*shards, *held_out)
    key = file_key((shard.path for shard in every), len(shards), [shard.dtype for shard in every])
    known = cache / f"{key}.shards.json"
    try:
        return _Examined(**json.loads(known.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    with ThreadPoolExecutor(cores()) as pool:
        scans = list(pool.map(_scanned, every))
    digest = hashlib.sha256(json.dumps([len(shards), [sha256 for sha256, _ in scans]]).encode())
    highest = max(token for _, token in scans)
    length = count(shards)
    parts = (shards, held_out) if held_out else split(shards, length - length // HELD_OUT_SHARE)
    examined = _Examined(digest.hexdigest(), highest, sampled_entropy(*parts, highest + 1))
    with written(known) as file:
        file.write(json.dumps(asdict(examined)).encode())
    return examined


def _scanned(shard: Shard) -> tuple[str, int]:
    """Return the digest of a shard's tokens and the highest one. Raises UsageError if one is negative."""
    digest, highest = hashlib.sha256(), 0
    for start, block in shard.blocks():
        if (lowest := int(block.min())) < 0:
            at = start + int(block.argmin())
            raise UsageError(
                f"data: {shard.path}: token {at:,} is {lowest}, which is negative; mask targets in a script"
            )
        highest = max(highest, int(block.max()))
        if highest >= LARGEST:
            at = start + int(block.argmax())
            raise UsageError(
                f"data: {shard.path}: token {at:,} is {highest}: the file isn't {shard.dtype}; set data.dtype"
            )
        digest.update(block.tobytes())
    return f"{shard.dtype} {digest.hexdigest()}", highest
