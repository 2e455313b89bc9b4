"""Tokenize text once per node, into a file in the cache that is named by a digest of its inputs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from launch_train.common.errors import UsageError
from launch_train.common.text import si
from launch_train.data import jsonl
from launch_train.data.jsonl import opened
from launch_train.data.text import files_of, unreadable
from launch_train.data.token_file import BLOCK, Corpus, Measured, measured, temporary
from launch_train.data.tokenizers import Tokenizer

VERSION = "2"
"""Version of the tokenization procedure; part of the name of cached files."""

PIECE = 1 << 18
"""Minimum characters of a piece of a document (except its last), cut at a line end, as tokenizers do."""

AT_ONCE = 1 << 23
"""Characters passed to the tokenizer per call: enough to use all cores, few enough to fit into memory."""

TELL_SECONDS = 10.0
"""Seconds between two progress lines."""


class Piece(NamedTuple):
    """A part of a document. `ends`: it is the last one."""

    text: str
    ends: bool


def prepare(data: str, tokenizer: Tokenizer, cache: Path, name: str = "") -> Corpus:
    """Tokenize `data` (as in `launch_train.data.text`), unless it is cached, and return the corpus, named `name`.

    A JSON Lines file (launch_train.data.jsonl) has one document per line; any other file is one document. Both may be
    compressed (.gz). Raises UsageError if there is no text, or it can't be read.
    """
    files = files_of(data)
    key = _key(files, tokenizer)
    tokens, about = cache / f"{key}.tokens", cache / f"{key}.json"
    known = _known(tokens, about, tokenizer)
    if known is None:
        size = _write(tokens, files, tokenizer)
        known = measured(tokens, tokenizer.dtype, tokenizer.vocab_size), size
        _note(about, *known)
    found, size = known
    return Corpus(
        path=tokens,
        name=name or data,
        files=len(files),
        bytes=size,
        held_out=found.held_out,
        sha256=found.sha256,
        unigram_entropy=found.unigram_entropy,
        length=found.length,
        dtype=tokenizer.dtype,
        unit="token",
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        mask=tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask,
        end=tokenizer.end,
    )


def _key(files: list[Path], tokenizer: Tokenizer) -> str:
    """Return a digest of everything that the tokens depend on."""
    digest = hashlib.sha256(f"{VERSION} {PIECE} {tokenizer.digest} {tokenizer.end}".encode())
    for path in files:
        digest.update(f"\0{''.join(path.suffixes[-2:])} {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _known(tokens: Path, about: Path, tokenizer: Tokenizer) -> tuple[Measured, int] | None:
    """Return the statistics of cached tokens and the size of their text in bytes, or None if they are not cached."""
    try:
        said = json.loads(about.read_text())
        found, size = Measured(**said["tokens"]), int(said["bytes"])
        whole = tokens.stat().st_size == found.length * np.dtype(tokenizer.dtype).itemsize
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (found, size) if whole else None


def _note(about: Path, found: Measured, size: int) -> None:
    with temporary(about.parent) as (file, path):
        file.write(json.dumps({"tokens": asdict(found), "bytes": size}).encode())
        file.flush()
        path.replace(about)


# --- Writing tokens -------------------------------------------------------------------------------------------------


def _write(tokens: Path, files: list[Path], tokenizer: Tokenizer) -> int:
    """Write all tokens to one file, and return the size of the text in bytes."""
    told, size = Told(), 0
    with temporary(tokens.parent) as (sink, path):
        for batch in batches(pieces(files)):
            for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                ends = [tokenizer.end] if piece.ends and tokenizer.end is not None else []
                sink.write(np.asarray([*ids, *ends], tokenizer.dtype).tobytes())
                size += len(piece.text.encode())
            told.more(sum(piece.ends for piece in batch), size)
        sink.flush()
        path.replace(tokens)
    return size


class Told:
    """Print progress every TELL_SECONDS; nothing for short work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, say: Callable[[str], None] = print) -> None:
        self._clock, self._say = clock, say
        self._began = self._told = clock()
        self._documents = 0

    def more(self, documents: int, size: int) -> None:
        """Add documents to the count. `size`: total bytes so far."""
        self._documents += documents
        now = self._clock()
        if now - self._told >= TELL_SECONDS:
            self._told, seconds = now, now - self._began
            rate = f"{si(self._documents / seconds)} documents/s, {si(size / seconds)}B/s"
            self._say(f"tokens: {si(self._documents)} documents, {si(size)}B ({rate})")


def batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into lists of about AT_ONCE characters."""
    batch, characters = list[Piece](), 0
    for piece in found:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def pieces(files: Iterable[Path]) -> Iterator[Piece]:
    """Yield the pieces of all documents of all files. Raises UsageError if a file can't be read."""
    for path in files:
        if jsonl.are_in(path):
            for text in jsonl.documents(path):
                yield from _cut(io.StringIO(text, newline=""))
            continue
        try:
            with opened(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
                yield from _cut(file)
        except UnicodeDecodeError as error:
            raise UsageError(f"data: {path} is not UTF-8: {error.reason} (byte {error.start} of a block)") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UsageError(f"data: {path} can't be unpacked: {error}") from error
        except OSError as error:
            raise unreadable(path, error) from error


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
