"""What the nodes of a run print, from the parts in the run folder (train/launch_train/telemetry/log_capture.py): for
who may not read Cloud Logging.

It has no times, and comes some seconds later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from launch_train.common import contract
from launch_train.common.storage import Storage
from launcher.gcp.storage import read_errors
from launcher.runs.logs.line import Line, cleaned, last_drawn

NAME: Final = re.compile(rf"{contract.TEXT}/(\d+)-(\d+)-(\d+)(?:-(\d+))?\.log")
PARTS: Final = 8
"""For one look; a part has up to a megabyte."""
ANSWER_SECONDS: Final = 20.0


class Part(NamedTuple):
    """A part, in the order in which parts are read: the nodes' side by side. `variant`: its name had been taken."""

    attempt: int
    part: int
    variant: int
    node: int
    name: str


class TextLog:
    """The text of one attempt, or of all."""

    def __init__(self, folder: Storage, attempt: int | None = None) -> None:
        self._folder = folder.within(ANSWER_SECONDS)
        self._prefix = contract.text_part(attempt, 0, 0).partition("-")[0] + "-" if attempt else f"{contract.TEXT}/"
        self._read: set[str] = set()
        self._rests: dict[tuple[int, int], bytes] = {}

    def new(self) -> list[Line]:
        """The next lines, at most `PARTS` parts of them. Raises LaunchError: the folder can't be read (now)."""
        parts = self._parts()
        if not parts:
            return list(self._unfinished())
        return [line for part in parts[:PARTS] for line in self._lines(part)]

    def past(self) -> Iterator[Line]:
        """All lines that are there. Raises as `new` does."""
        for part in self._parts():
            yield from self._lines(part)
        yield from self._unfinished()

    def tail(self, count: int) -> list[Line]:
        """The last so many lines that are there; `new` goes on after them. Raises as `new` does."""
        parts, texts, lines = self._parts(), dict[str, bytes](), 0
        for part in reversed(parts):
            if lines > count:
                break
            texts[part.name] = self._bytes(part)
            lines += texts[part.name].count(b"\n")
        self._read.update(part.name for part in parts)
        found = [line for part in parts if part.name in texts for line in self._cut(part, texts[part.name])]
        found += self._unfinished()
        return found[len(found) - count :] if count < len(found) else found

    def skip(self) -> None:
        """Pass over what is there. Raises as `new` does."""
        self._read.update(part.name for part in self._parts())

    def is_empty(self) -> bool:
        """Whether there is nothing (more) to read. Raises as `new` does."""
        return not self._parts()

    def _parts(self) -> Sequence[Part]:
        """Those that were not read yet."""
        with read_errors():
            names = self._folder.list(self._prefix)
        return sorted(part for name in names if name not in self._read and (part := part_of(name)))

    def _lines(self, part: Part) -> Iterator[Line]:
        data = self._bytes(part)
        self._read.add(part.name)
        return self._cut(part, data)

    def _bytes(self, part: Part) -> bytes:
        with read_errors():
            try:
                return self._folder.read(part.name)
            except FileNotFoundError:  # somebody cleans up
                return b""

    def _cut(self, part: Part, data: bytes) -> Iterator[Line]:
        """The whole lines; what comes after the last newline waits for the next part."""
        stream = (part.attempt, part.node)
        *whole, rest = (self._rests.pop(stream, b"") + data).split(b"\n")
        if rest:
            self._rests[stream] = rest
        return (line_of(part.node, line) for line in whole)

    def _unfinished(self) -> Iterator[Line]:
        """What is left without a newline, when nothing has followed."""
        rests, self._rests = self._rests, {}
        return (line_of(node, rest) for (_, node), rest in sorted(rests.items()))


def part_of(name: str) -> Part | None:
    """What a name means; None: it is no part."""
    found = NAME.fullmatch(name)
    if not found:
        return None
    attempt, node, part, variant = map(int, found.groups("0"))
    return Part(attempt, part, variant, node, name)


def line_of(node: int, line: bytes) -> Line:
    """A line of a node."""
    return Line(0.0, contract.task_name(node), cleaned(last_drawn(line.decode("utf-8", "replace"))), "DEFAULT")
