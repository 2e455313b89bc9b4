"""Read the nodes' output from the run folder, for users who may not read Cloud Logging.

The nodes write it in parts (train/launch_train/telemetry/log_capture.py). It has no timestamps and arrives some seconds
later than in Cloud Logging.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.storage import Storage
from launcher.gcp.storage import read_errors
from launcher.runs.logs.line import Line, clean_text, last_overwrite

PARTS_PER_POLL: Final = 8
"""A part has up to a megabyte."""
ANSWER_SECONDS: Final = 20.0


class LogPart(NamedTuple):
    """One object with output of one node. Sorts in reading order: all nodes' first parts, then their second ones.

    `variant` is above 0 where the name without it had been taken.
    """

    attempt: int
    part: int
    variant: int
    node: int
    name: str


class TextLogReader:
    """Read the output of one attempt, or of all attempts."""

    def __init__(self, folder: Storage, attempt: int | None = None, *, tail: int | None = None) -> None:
        """`tail`: begin with so many last lines; None: with the first one."""
        self._tail = tail
        self._folder = folder.within(ANSWER_SECONDS)
        self._prefix = runfolder.text_part(attempt, 0, 0).partition("-")[0] + "-" if attempt else f"{runfolder.TEXT}/"
        self._read: set[str] = set()
        self._partial_lines: dict[tuple[int, int], bytes] = {}

    def read_new(self) -> list[Line]:
        """Return the next lines, of at most `PARTS_PER_POLL` parts. Raises LaunchError: the folder can't be read."""
        if self._tail is not None:
            return self.read_tail(self._tail)
        parts = self._unread_parts()
        if not parts:
            return list(self._flush_partial_lines())
        return [line for part in parts[:PARTS_PER_POLL] for line in self._lines(part)]

    def read_existing(self) -> Iterator[Line]:
        """Yield all lines written so far, or the last ones. Raises as `read_new` does."""
        if self._tail is not None:
            yield from self.read_tail(self._tail)
        for part in self._unread_parts():
            yield from self._lines(part)
        yield from self._flush_partial_lines()

    def read_tail(self, count: int) -> list[Line]:
        """Return the last `count` lines; `read_new` continues after them. Raises as `read_new` does."""
        self._tail = None
        parts, texts, lines = self._unread_parts(), dict[str, bytes](), 0
        for part in reversed(parts):
            if lines > count:
                break
            texts[part.name] = self._bytes(part)
            lines += texts[part.name].count(b"\n")
        self._read.update(part.name for part in parts)
        found = [line for part in parts if part.name in texts for line in self._complete_lines(part, texts[part.name])]
        found += self._flush_partial_lines()
        return found[len(found) - count :] if count < len(found) else found

    def skip_existing(self) -> None:
        """Skip what was written so far. Raises as `read_new` does."""
        self._read.update(part.name for part in self._unread_parts())

    def is_empty(self) -> bool:
        """Return whether nothing (more) can be read. Raises as `read_new` does."""
        return not self._unread_parts()

    def _unread_parts(self) -> Sequence[LogPart]:
        with read_errors():
            names = self._folder.list(self._prefix)
        parts = []
        for name in names:
            match = runfolder.TEXT_PART.match(name)
            if match and name not in self._read:
                attempt, node, part, variant = map(int, match.groups("0"))
                parts.append(LogPart(attempt, part, variant, node, name))
        return sorted(parts)

    def _lines(self, part: LogPart) -> Iterator[Line]:
        data = self._bytes(part)
        self._read.add(part.name)
        return self._complete_lines(part, data)

    def _bytes(self, part: LogPart) -> bytes:
        with read_errors():
            try:
                return self._folder.read(part.name)
            except FileNotFoundError:  # deleted since it was listed
                return b""

    def _complete_lines(self, part: LogPart, data: bytes) -> Iterator[Line]:
        """Return the complete lines, and keep what follows the last newline until the next part."""
        stream = (part.attempt, part.node)
        *complete, rest = (self._partial_lines.pop(stream, b"") + data).split(b"\n")
        if rest:
            self._partial_lines[stream] = rest
        return (decode_line(part.node, line) for line in complete)

    def _flush_partial_lines(self) -> Iterator[Line]:
        """Return the lines without a final newline, once no part has followed."""
        partial, self._partial_lines = self._partial_lines, {}
        return (decode_line(node, rest) for (_, node), rest in sorted(partial.items()))


def decode_line(node: int, line: bytes) -> Line:
    return Line(0.0, contract.task_name(node), clean_text(last_overwrite(line.decode("utf-8", "replace"))), "DEFAULT")
