"""Read documents from JSON Lines files: one object per line, with the text under the key `text`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from launch_train.common.errors import UsageError

SUFFIXES: Final = (".jsonl", ".ndjson")
KEYS: Final = 5
"""Maximum number of a record's keys listed in an error."""


def opened(path: Path) -> IO[bytes]:
    """Open a file for reading; .gz files are decompressed."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def are_in(path: Path) -> bool:
    """Return whether the file is JSON Lines, by its name, compressed or not."""
    return _name(path).endswith(SUFFIXES)


def refuse_json(path: Path) -> None:
    """Raise UsageError for a plain JSON file: training on its syntax is surely a mistake."""
    if _name(path).endswith(".json"):
        raise UsageError(
            f'data: {path} is JSON; records are read from .jsonl, one {{"text": …}} a line. For an array: '
            f"jq -c '.[]' {path.name} > {path.name.removesuffix('.gz').removesuffix('.json')}.jsonl"
        )


def documents(path: Path) -> Iterator[str]:
    """Yield the texts of a file in order, skipping empty lines. Raises UsageError with the line number."""
    try:
        with opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text(line, f"data: {path}:{number}:")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"data: {path} can't be unpacked: {error}") from error
    except OSError as error:
        raise UsageError(f"data: {path} can't be read: {error.strerror or error}") from error


def _text(line: bytes, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        text = record.get("text") if isinstance(record, dict) else None
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{where} unpaired surrogate (\\ud800 to \\udfff), which is no text") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} not JSON ({getattr(error, 'msg', error)})") from error
    raise UsageError(f'{where} no JSON object with a "text"{_keys(record)}')


def _keys(record: Any) -> str:
    if not isinstance(record, dict) or not record:
        return ""
    what = "which is no string" if "text" in record else f"it has {', '.join(list(record)[:KEYS])}"
    return f", {what}"


def _name(path: Path) -> str:
    return path.name.lower().removesuffix(".gz")
