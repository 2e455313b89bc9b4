"""A line of a job's output, made safe for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple


class Line(NamedTuple):
    """One line of a job's output. `time` is in Unix seconds by Google's clock; 0 if unknown."""

    time: float
    replica: str
    """For example workerpool0-0; `service` is Vertex AI itself."""
    text: str
    """Without control characters other than tabs."""
    severity: str
    """Cloud Logging's: DEFAULT, INFO, WARNING, ERROR …"""


COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition (ECMA-48): colours, bold, underline."""
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that could move a terminal's cursor, change its title, or reverse the text's direction."""
SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""JSON may contain a lone surrogate, UTF-8 can't."""


def clean_text(text: str) -> str:
    """Return `text` without colours and with control characters escaped."""
    if text.isprintable():
        return text
    text = SURROGATE.sub("\ufffd", COLOUR.sub("", text))
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, cleaned. A final newline adds no empty line."""
    for line in text.removesuffix("\n").split("\n"):
        yield clean_text(last_overwrite(line))


def last_overwrite(line: str) -> str:
    """Return what a terminal shows of a line that a progress bar has overwritten with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2]
