"""Read files of many records: texts from JSON Lines, texts or tokens from Parquet and Arrow files. Tables need pyarrow.

`Dataset.save_to_disk` writes Arrow's streaming format, `to_parquet` and the hub Parquet; a table of tokens has a column
`input_ids` with a list of token numbers per row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.common.text import one_line
from launch_train.data.files import import_optional, opened, unpacked_name
from launch_train.data.token_file import file_key, written

JSON_LINES: Final = (".jsonl", ".ndjson")
TABLES: Final = (".parquet", ".arrow")
TOKENS: Final = "input_ids"
KEYS: Final = 5
"""Maximum number of a record's keys listed in an error."""
ROWS: Final = 1000
"""Rows of a Parquet file that are decoded together."""
ARROW_FILE: Final = b"ARROW1"
"""The first bytes of Arrow's file format; its streaming format has no magic number."""


def is_json_lines(path: Path) -> bool:
    """Return whether a file is JSON Lines, by its name, compressed or not."""
    return unpacked_name(path).endswith(JSON_LINES)


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def are_records(path: Path) -> bool:
    return is_json_lines(path) or is_table(path)


def documents(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of a file of records, without empty ones: the texts under a key, or in a column of a table.

    Raises UsageError, with the line or row, if one isn't text.
    """
    number = 0
    if is_table(path):
        for values in _columns(path, column):
            for value in values.to_pylist():
                number += 1
                if value is not None and not isinstance(value, str):
                    raise UsageError(f"data: {path}: {column} of row {number:,} is not text: {str(value)[:40]!r}")
                if value:
                    yield value
        return
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text_of_line(line, column, f"data: {path}:{number}:")


# --- JSON Lines: one object per line, with the text under one key -----------------------------------------------------


def _text_of_line(line: bytes, key: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        text = record.get(key) if isinstance(record, dict) else None
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} unpaired surrogate (\\ud800 to \\udfff), which is not valid text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} not JSON ({getattr(error, 'msg', error)})") from error
    if isinstance(record, dict) and key in record:
        raise UsageError(f'{where} "{key}" is not a string')
    known = f", it has {', '.join(list(record)[:KEYS])}" if isinstance(record, dict) and record else ""
    raise UsageError(f'{where} not a JSON object with "{key}"{known}')


# --- Tables -----------------------------------------------------------------------------------------------------------


def holds_tokens(path: Path, column: str) -> bool:
    """Return whether a file is a table of tokens: with `input_ids`, but without the text `column`."""
    if not is_table(path):
        return False
    with _opened_table(path) as (names, _):
        return TOKENS in names and column not in names


def write_tokens(path: Path, cache: Path) -> Path:
    """Write all tokens of a table to a .npy file in the cache, unless it is there, and return its path."""
    kept = cache / f"{file_key([path])}.npy"
    if not kept.is_file():
        dtype = "<u2" if max((int(block.max()) for block in _token_blocks(path)), default=0) < 1 << 16 else "<u4"
        length = sum(len(block) for block in _token_blocks(path))
        with written(kept) as file:
            header = {"descr": dtype, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            for block in _token_blocks(path):
                file.write(block.astype(dtype).tobytes())
    return kept


def _token_blocks(path: Path) -> Iterator[NDArray[Any]]:
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
    with _opened_table(path) as (names, batches):
        if column not in names:
            raise UsageError(
                f"data: {path} has the columns {', '.join(names[:8])}, and no {column}: set data.column to the text's"
            )
        yield from (batch.column(0) for batch in batches(column))


@contextmanager
def _opened_table(path: Path) -> Iterator[tuple[list[str], Any]]:
    """Open a table: the names of its columns, and a function that yields batches with one of them alone."""
    needed = (
        ".parquet and .arrow files need the package pyarrow ({}): pip install pyarrow, and for the cloud add the line "
        "pyarrow to the file that image.requirements names"
    )
    arrow = import_optional("pyarrow", needed)
    try:
        if path.suffix.lower() == ".parquet":
            with path.open("rb"), import_optional("pyarrow.parquet", needed).ParquetFile(path) as table:
                yield list(table.schema_arrow.names), lambda name: table.iter_batches(ROWS, columns=[name])
            return
        with path.open("rb") as file, arrow.memory_map(str(path)) as mapped:
            if file.read(len(ARROW_FILE)) == ARROW_FILE:
                reader = arrow.ipc.open_file(mapped)
                batches: Any = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = reader = arrow.ipc.open_stream(mapped)
            yield list(reader.schema.names), lambda name: (batch.select([name]) for batch in batches)
    except arrow.ArrowException as error:
        raise UsageError(f"data: {path} can't be read as {path.suffix[1:]}: {one_line(error, 200)}") from error
    except OSError as error:
        raise UsageError(f"data: {path} can't be read: {error.strerror or one_line(error, 200)}") from error
