"""Read documents from JSON Lines files: one object per line, with the text under one key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from launch_train.common.errors import UsageError
from launch_train.data.files import opened, unpacked_name

SUFFIXES: Final = (".jsonl", ".ndjson")
KEYS: Final = 5
"""Maximum number of a record's keys listed in an error."""


def are_in(path: Path) -> bool:
    """Return whether the file is JSON Lines, by its name, compressed or not."""
    return unpacked_name(path).endswith(SUFFIXES)


def refuse_json(path: Path) -> None:
    """Raise UsageError for a plain JSON file: training on its syntax is surely a mistake."""
    if (name := unpacked_name(path)).endswith(".json"):
        raise UsageError(
            f'data: {path} is JSON; records are read from .jsonl, one {{"text": …}} a line. For an array: '
            f"jq -c '.[]' {path.name} > {name.removesuffix('.json')}.jsonl"
        )


def documents(path: Path, key: str = "text") -> Iterator[str]:
    """Yield the texts of a file in order, skipping empty lines. Raises UsageError with the line number."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text(line, key, f"data: {path}:{number}:")


def _text(line: bytes, key: str, where: str) -> str:
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
    raise UsageError(f"{where} {_problem(record, key)}")


def _problem(record: Any, key: str) -> str:
    if isinstance(record, dict) and key in record:
        return f'"{key}" is not a string'
    known = f", it has {', '.join(list(record)[:KEYS])}" if isinstance(record, dict) and record else ""
    return f'not a JSON object with "{key}"{known}'
