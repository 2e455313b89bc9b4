"""Tokenize text once per node, into a file in the cache that is named by a digest of its inputs."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch_train.common.cgroup import cores
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.storage.bucket import Object
from launch_train.common.text import si
from launch_train.data.files import opened
from launch_train.data.gcs_cache import stream
from launch_train.data.records import are_records, documents
from launch_train.data.token_file import BLOCK, Corpus, ProgressTimer, Shard, TokenStatistics, measured, written
from launch_train.data.token_store import TokenStore
from launch_train.data.tokenizers import Tokenizer, open_tokenizer
from launch_train.data.workers import leave_with_rank, start_server

VERSION = "2"
"""Version of the tokenization procedure; part of the name of cached files."""

PIECE = 1 << 18
"""Minimum characters of a piece of a document (except its last), cut at a line end, as tokenizers do."""

AT_ONCE = 1 << 23
"""Characters passed to the tokenizer per call: enough to use all cores, few enough to fit into memory."""

AT_ONCE_PER_PROCESS = 1 << 20
"""The same for one of several processes."""

SHARED_BYTES, SHARED_CORES = 64 << 20, 8
"""Size of the files, and number of cores, from which on several processes encode. With fewer cores the tokenizer's own
threads are as fast: the part that they don't share takes 2 % of the time on one core (benchmarks/tokenizing.py)."""

PART_BYTES = 1 << 30
"""Size of the parts of a bucket's files, which nodes tokenize independently and whose tokens are stored separately."""


class Piece(NamedTuple):
    """A part of a document. `ends`: it is the last one."""

    text: str
    ends: bool


@dataclass(frozen=True)
class TextFiles:
    count: int
    size: int
    """Bytes of all files, as they are stored."""
    identity: Iterable[bytes]
    """Everything about the files that their tokens depend on."""
    paths: Iterable[Path]
    """The files in order, on this machine. A path is valid until the next one is requested."""


def local_files(files: Sequence[Path]) -> TextFiles:
    """Return files on this machine, identified by their content."""

    def identity() -> Iterator[bytes]:
        for path in files:
            yield f"\0{''.join(path.suffixes[-2:])} {path.stat().st_size}\0".encode()
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block

    return TextFiles(len(files), sum(path.stat().st_size for path in files), identity(), files)


def bucket_files(url: str, objects: Sequence[Object], cache: Path) -> TextFiles:
    """Return objects of a bucket, identified by their checksums: they are only downloaded to be tokenized, and not
    kept."""
    contents = [item.crc32c + item.md5 or f"generation {item.version}" for item in objects]
    identity = [
        f"\0{''.join(Path(item.name).suffixes[-2:])} {item.size} {content}\0".encode()
        for item, content in zip(objects, contents, strict=True)
    ]
    return TextFiles(len(objects), sum(item.size for item in objects), identity, stream(url, objects, cache))


def by_size(objects: Sequence[Object]) -> list[list[Object]]:
    """Divide objects into consecutive parts of PART_BYTES or a little more. It depends on the objects alone, because
    the parts decide the order of samples: no sample spans two of them."""
    parts, size = [list[Object]()], 0
    for item in objects:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.size
    return parts


def corpus_of_tokens(
    files: TextFiles,
    tokenizer: Tokenizer,
    cache: Path,
    name: str,
    column: str = "text",
    store: TokenStore | None = None,
) -> Corpus:
    """Tokenize files, unless their tokens are in the cache or the store, and return the corpus, named `name`.

    A JSON Lines file has one document per line, and a table one per row, both in `column`; any other file is one
    document. All but tables may be compressed (.gz, .zst).
    """
    other_column = f" {column}" if column != "text" else ""
    digest = hashlib.sha256(f"{VERSION} {PIECE} {tokenizer.digest} {tokenizer.end}{other_column}".encode())
    for part in files.identity:
        digest.update(part)
    key = digest.hexdigest()
    tokens, about = cache / f"{key}.tokens", cache / f"{key}.json"
    known = _known(tokens, about, tokenizer)
    if known is None:
        known = store.get(key, tokens) if store else None
        if known is None:
            size = _write(tokens, files, tokenizer, column)
            known = measured(tokens, tokenizer.dtype, tokenizer.vocab_size), size
            if store:
                store.put(key, tokens, *known)
        with written(about) as file:
            file.write(json.dumps({"tokens": asdict(known[0]), "bytes": known[1]}).encode())
    statistics, size = known
    return Corpus(
        shards=(Shard(tokens, statistics.length, tokenizer.dtype),),
        name=name,
        files=files.count,
        bytes=size,
        sha256=statistics.sha256,
        unigram_entropy=statistics.unigram_entropy,
        unit="token",
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        mask=tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask,
        end=tokenizer.end,
    )


def _known(tokens: Path, about: Path, tokenizer: Tokenizer) -> tuple[TokenStatistics, int] | None:
    """Return the statistics of cached tokens and the size of their text in bytes, or None if they are not cached."""
    try:
        record = json.loads(about.read_text())
        statistics, size = TokenStatistics(**record["tokens"]), int(record["bytes"])
        is_complete = tokens.stat().st_size == statistics.length * np.dtype(tokenizer.dtype).itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (statistics, size) if is_complete else None


# --- Writing tokens -------------------------------------------------------------------------------------------------


def _write(tokens: Path, files: TextFiles, tokenizer: Tokenizer, column: str) -> int:
    """Write all tokens to one file, and return the size of the text in bytes."""
    progress, size, documents = ProgressTimer(), 0, 0
    text = pieces(files.paths, column)
    # For a small text, the start of processes would take longer than they save.
    if files.size >= SHARED_BYTES and cores() >= SHARED_CORES and tokenizer.origin:
        batches_of_tokens = _by_processes(cores(), text, tokenizer)
    else:  # the tokenizer's own threads use all cores for a part of the work
        batches_of_tokens = (_encoded(batch, tokenizer) for batch in batches(text))
    with written(tokens) as file:
        for encoded in batches_of_tokens:
            file.write(encoded.tokens)
            size += encoded.size
            documents += encoded.documents
            if seconds := progress.due():
                rate = f"{si(documents / seconds)} documents/s, {si(size / seconds)}B/s"
                print(f"tokens: {si(documents)} documents, {si(size)}B ({rate})")
    return size


class Encoded(NamedTuple):
    """The tokens of some pieces, in the tokenizer's type; the documents that end in them; their text's bytes."""

    tokens: bytes
    documents: int
    size: int


def _encoded(batch: list[Piece], tokenizer: Tokenizer) -> Encoded:
    arrays = list[NDArray[Any]]()
    for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
        ends = [tokenizer.end] if piece.ends and tokenizer.end is not None else []
        arrays.append(np.asarray([*ids, *ends], tokenizer.dtype))
    size = sum(len(piece.text.encode()) for piece in batch)
    return Encoded(b"".join(array.tobytes() for array in arrays), sum(piece.ends for piece in batch), size)


# --- Several processes ----------------------------------------------------------------------------------------------


def _by_processes(count: int, text: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Encode in `count` processes, in order: this one reads the files and writes the tokens.

    The tokenizer's threads share less of the work: making lists of numbers, and arrays of these, holds Python's lock.
    """
    start_server()
    pool = ProcessPoolExecutor(count, get_context("forkserver"), _open_in_worker, (tokenizer.origin,))
    pending = deque[Future[Encoded]]()
    try:
        for batch in batches(text, AT_ONCE_PER_PROCESS):
            pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) > 2 * count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise TrainError(
            "data: a process that encodes text has ended by itself: killed, perhaps as memory ran out"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _open_in_worker(origin: str) -> None:
    leave_with_rank()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker.append(open_tokenizer(origin))


def _encode_in_worker(batch: list[Piece]) -> Encoded:
    return _encoded(batch, _worker[0])


_worker: list[Tokenizer] = []
"""The tokenizer of a worker process."""


def batches(text: Iterable[Piece], at_once: int = AT_ONCE) -> Iterator[list[Piece]]:
    """Group pieces into lists of about `at_once` characters."""
    batch, characters = list[Piece](), 0
    for piece in text:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= at_once:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pieces(files: Iterable[Path], column: str = "text") -> Iterator[Piece]:
    """Yield the pieces of all documents of all files. Raises UsageError if a file can't be read."""
    for path in files:
        if are_records(path):
            for text in documents(path, column):
                yield from _cut(io.StringIO(text, newline=""))
            continue
        try:
            with opened(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
                yield from _cut(file)
        except UnicodeDecodeError as error:
            raise UsageError(f"data: {path} is not UTF-8: {error.reason} (byte {error.start} of a block)") from error


def _cut(text: IO[str]) -> Iterator[Piece]:
    """Split a document into pieces of PIECE characters or slightly more; an empty document has none."""
    held = ""
    while more := text.read(PIECE):
        held += more
        end = _line_end(held)
        if end:
            yield Piece(held[:end], False)
            held = held[end:]
    if held:
        yield Piece(held, True)


def _line_end(text: str) -> int:
    """Return the start of the last line that doesn't begin with whitespace: no token spans it.

    Return 0 if the text is still too short or has no such line. A text of 16 pieces without one is cut anywhere.
    """
    if len(text) < PIECE:
        return 0
    end = text.rfind("\n", 1) + 1
    while end and (end == len(text) or text[end].isspace()):
        end = text.rfind("\n", 0, end - 1) + 1
    return end or (len(text) - 1 if len(text) >= 16 * PIECE else 0)
