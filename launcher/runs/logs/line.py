"""A line of a job's output, made fit for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple


class Line(NamedTuple):
    """One line of a job's output. `time` is in Unix seconds by Google's clock; 0 where nobody knows it."""

    time: float
    replica: str
    """workerpool0-0; `service` is Vertex AI itself."""
    text: str
    """Without control characters but for tabs."""
    severity: str
    """Of Cloud Logging: DEFAULT, INFO, WARNING, ERROR …"""


COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")
"""Select Graphic Rendition (ECMA-48): colours and the like."""
CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What could move a terminal's cursor, change its title, or turn the direction of what follows."""
HALF: Final = re.compile(r"[\ud800-\udfff]")
"""Half a character: JSON may hold one, UTF-8 can't."""


def cleaned(text: str) -> str:
    """`text` without colours, and with control characters spelled out."""
    if text.isprintable():
        return text
    text = HALF.sub("\ufffd", COLOUR.sub("", text))
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str) -> Iterator[str]:
    """The lines of a text, cleaned. A text that ends with a newline has no empty line after it."""
    for line in text.removesuffix("\n").split("\n"):
        yield cleaned(last_drawn(line))


def last_drawn(line: str) -> str:
    """What a terminal shows of a line that was written over and over, as progress bars do."""
    return line.rstrip("\r").rpartition("\r")[2]
