"""Read texts or tokens from Parquet and Arrow files, the files of Hugging Face's datasets. Needs pyarrow.

`Dataset.save_to_disk` writes Arrow's streaming format, `to_parquet` and the hub Parquet; a table of tokens has a column
`input_ids` with a list of token numbers per row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data.token_file import temporary

SUFFIXES: Final = (".parquet", ".arrow")
TOKENS: Final = "input_ids"
ROWS: Final = 1000
"""Rows of a Parquet file that are decoded together."""
ARROW_FILE: Final = b"ARROW1"
"""The first bytes of Arrow's file format; its streaming format has no magic number."""


def are_in(path: Path) -> bool:
    """Return whether a file is a table, by its name."""
    return path.suffix.lower() in SUFFIXES


def hold_tokens(path: Path, column: str) -> bool:
    """Return whether a file is a table of tokens: with `input_ids`, but without the text `column`."""
    if not are_in(path):
        return False
    with _table(path) as (names, _):
        return TOKENS in names and column not in names


def documents(path: Path, column: str) -> Iterator[str]:
    """Yield the texts of a column in order, without empty ones. Raises UsageError if it isn't text."""
    number = 0
    for values in _columns(path, column):
        for value in values.to_pylist():
            number += 1
            if value is not None and not isinstance(value, str):
                raise UsageError(f"data: {path}: {column} of row {number:,} is not text: {str(value)[:40]!r}")
            if value:
                yield value


def write_tokens(path: Path, cache: Path) -> Path:
    """Write all tokens of a table to a .npy file in the cache, unless it is there, and return its path."""
    at = path.stat()
    identity = json.dumps([str(path.resolve()), at.st_size, at.st_mtime_ns, at.st_ctime_ns])
    kept = cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.npy"
    if not kept.is_file():
        dtype = "<u2" if max((int(block.max()) for block in _tokens(path)), default=0) < 1 << 16 else "<u4"
        length = sum(len(block) for block in _tokens(path))
        with temporary(cache) as (file, made):
            header = {"descr": dtype, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            for block in _tokens(path):
                file.write(block.astype(dtype).tobytes())
            file.flush()
            made.replace(kept)
    return kept


def _tokens(path: Path) -> Iterator[NDArray[Any]]:
    """Yield the tokens of a table in blocks that are not empty."""
    for values in _columns(path, TOKENS):
        if not hasattr(values, "flatten"):
            raise UsageError(f"data: {path}: {TOKENS} is {values.type}, not a list of tokens per row")
        block = values.flatten().to_numpy(zero_copy_only=False)
        if len(block) and (block.dtype.kind not in "iu" or int(block.min()) < 0):
            raise UsageError(
                f"data: {path}: {TOKENS} is {values.type} with negative, missing or other values, not tokens"
            )
        if len(block):
            yield block


def _columns(path: Path, column: str) -> Iterator[Any]:
    """Yield a column's values as Arrow arrays, one for each part of the file. Raises UsageError."""
    with _table(path) as (names, batches):
        if column not in names:
            raise UsageError(
                f"data: {path} has the columns {', '.join(names[:8])}, and no {column}: set data.column to the text's"
            )
        yield from batches(column)


@contextmanager
def _table(path: Path) -> Iterator[tuple[list[str], Any]]:
    """Open a table: the names of its columns, and a function that yields the values of one."""
    arrow = _pyarrow("pyarrow")
    try:
        with path.open("rb") as file:
            start = file.read(len(ARROW_FILE))
        if path.suffix.lower() == ".parquet":
            with _pyarrow("pyarrow.parquet").ParquetFile(path) as table:
                yield (
                    list(table.schema_arrow.names),
                    lambda name: (batch.column(0) for batch in table.iter_batches(ROWS, columns=[name])),
                )
            return
        with arrow.memory_map(str(path)) as mapped:
            if start == ARROW_FILE:
                reader = arrow.ipc.open_file(mapped)
                batches: Any = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = reader = arrow.ipc.open_stream(mapped)
            yield list(reader.schema.names), lambda name: (batch.column(name) for batch in batches)
    except arrow.ArrowException as error:
        raise UsageError(
            f"data: {path} can't be read as {path.suffix[1:]}: {' '.join(str(error).split())[:200]}"
        ) from error
    except OSError as error:
        raise UsageError(
            f"data: {path} can't be read: {error.strerror or ' '.join(str(error).split())[:200]}"
        ) from error


def _pyarrow(module: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"data: .parquet and .arrow files need the package pyarrow ({error}): pip install pyarrow, and for the "
            "cloud add the line pyarrow to the file that image.requirements names"
        ) from error
