"""Texts of the screen alone: lines, columns, times, durations in flags. The other layers' are in `launcher/text.py`."""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from launcher.cli.style import styled

WIDTH = 80
"""Columns of a page."""
LABEL = 10
"""Columns of the labels on its left."""

COMMAND = r"\s*(gcloud|launch|export|pip|docker|sudo|apt-get)\b"
"""A line with a command is never wrapped, so that it can be copied."""


def fitted(text: str, before: int = 0) -> str:
    """Return a message wrapped to a terminal's width, minus `before` characters; unchanged for a file or a pipe."""
    if not sys.stderr.isatty():
        return text
    return "\n".join("\n".join(in_width(line, WIDTH - before)) for line in text.split("\n"))


def in_width(line: str, width: int) -> list[str]:
    """Return the lines of a line, each with its indentation; a command is not cut."""
    if re.match(COMMAND, line):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def labelled(label: str, text: str) -> Iterator[str]:
    """Yield a label with the wrapped text beside it."""
    for number, line in enumerate(wrapped(text, WIDTH - LABEL)):
        start = f"{label if number == 0 else '':<{LABEL}}"
        yield f"{styled(start, '1') if start.strip() else start}{line}"


def wrapped(text: str, width: int) -> list[str]:
    """Return lines of at most `width` characters; control characters are escaped."""
    return textwrap.wrap(printable(text), width, break_on_hyphens=False) or [""]


def printable(text: str) -> str:
    """Return the text with control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


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
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def columns(rows: Sequence[Sequence[str]], align: str = "<", gap: str = "  ") -> Iterator[str]:
    """Yield a line for each row; `align` is `<` (left) or `>` (right) for all columns, or one of them for each."""
    widths = column_widths(rows)
    sides = align * len(widths) if len(align) == 1 else align
    for row in rows:
        yield gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()


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
