"""Texts of the screen alone: times, columns, durations in flags. The other layers' are in `launcher/text.py`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from launcher.errors import UsageError


def flag_seconds(text: str, flag: str) -> float:
    """Return the seconds of a flag's `15s`, `2m` or `1h`, which a spec takes too. Raises UsageError."""
    from launcher.spec.kinds import DURATION
    from launcher.text import parse_duration

    if re.search(DURATION, text):
        return parse_duration(text)
    near = f"{text}s" if text.isdecimal() and int(text) else "15s, 2m or 1h"
    raise UsageError(f"{flag}: invalid duration {text!r}; use for example {near}")


def utc_stamp(seconds: float) -> str:
    """Return day and time of Unix seconds, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def local_moment(at: float, now: float) -> str:
    """Return `22:40` in this machine's time zone, with the day if it is not today: `Sun 06:40`, `28 Nov 06:40`."""
    there, here = (datetime.fromtimestamp(seconds, UTC).astimezone() for seconds in (at, now))
    days = (there.date() - here.date()).days
    day = "" if not days else "%a " if abs(days) < 7 else "%-d %b "
    return there.strftime(f"{day}%H:%M")


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def columns(rows: Sequence[Sequence[str]], align: str = "<") -> Iterator[str]:
    """Yield a line for each row; `align` is `<` (left) or `>` (right)."""
    widths = column_widths(rows)
    for row in rows:
        yield "  ".join(f"{cell:{align}{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def fit_columns(rows: Sequence[Mapping[str, str]], width: int, less: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows without empty columns, in at most `width` columns if `less` suffices: in its order, a column's
    texts are cut at its separator; without one the column is dropped."""
    kept = [name for name in rows[0] if any(row[name] for row in rows)]
    fitted = [{name: row[name] for name in kept} for row in rows]
    for column, separator in less.items():
        if table_width(fitted) <= width:
            break
        if separator:
            fitted = [{**row, column: row.get(column, "").partition(separator)[0]} for row in fitted]
        else:
            fitted = [{name: cell for name, cell in row.items() if name != column} for row in fitted]
    return fitted


def table_width(rows: Sequence[Mapping[str, str]]) -> int:
    """Return the width of the widest line."""
    return sum(size + 2 for size in column_widths([[*rows[0]], *([*row.values()] for row in rows)])) - 2
