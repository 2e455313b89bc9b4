"""What a VM's node prints, made into entries of Cloud Logging. Pure, but for the clock that says how old a rest is.

https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from launch_train.common import contract

SECOND: Final = 10**9
"""Times are Unix nanoseconds here."""
PIECE: Final = 60_000
"""Characters (of up to four bytes) after which a line goes on in another entry; an entry may have about 256 KB:
https://cloud.google.com/logging/quotas."""
ENTRIES: Final = 1000
REQUEST: Final = 5_000_000
"""Entries and bytes of one request; Google takes 10 MB."""
REST: Final = 10 * SECOND
"""How long the beginning of a line waits for its end: a progress bar has none for hours, and is one entry each time."""
LONGEST_REST: Final = 1 << 16


@dataclass(frozen=True)
class Source:
    """Where entries come from: the labels of the resource (a gce_instance) and those of each entry."""

    project: str
    resource: Mapping[str, str]
    labels: Mapping[str, str]

    @property
    def instance(self) -> str:
        """The VM's number."""
        return self.resource["instance_id"]

    def head(self) -> dict[str, Any]:
        """What holds for all entries of a request."""
        return {
            "logName": f"projects/{self.project}/logs/{contract.LOG}",
            "resource": {"type": "gce_instance", "labels": dict(self.resource)},
            "labels": dict(self.labels),
            "partialSuccess": True,
        }


class Chunk(NamedTuple):
    """Bytes that were written to the descriptor `number` (1 or 2), at `time`."""

    time: int
    number: int
    data: bytes


class Said(NamedTuple):
    """A line, without its newline."""

    time: int
    severity: str
    text: str


class Entries:
    """Chunks made into entries. Each has an id of its own, so that one that is sent twice counts once, and their order
    is that of their ids where their time is the same."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._rests: dict[int, Chunk] = {}

    def made(self, chunks: Iterable[Chunk], missed: int = 0, *, last: bool) -> Iterator[bytes]:
        """Entries as JSON. The beginning of a line waits for its end, for a while or until the `last` chunks."""
        if missed:
            text = f"launch: {missed} lines are missing here: Cloud Logging took them too slowly"
            yield from self._entry(Said(time.time_ns(), "WARNING", text))
        for chunk in chunks:
            yield from self._lines(chunk)
        for number, rest in list(self._rests.items()):
            if last or time.time_ns() - rest.time >= REST or len(rest.data) >= LONGEST_REST:
                del self._rests[number]
                yield from self._entry(spoken(rest.time, number, rest.data))

    def _lines(self, chunk: Chunk) -> Iterator[bytes]:
        before = self._rests.pop(chunk.number, None)
        *whole, rest = ((before.data if before else b"") + chunk.data).split(b"\n")
        for line in whole:
            yield from self._entry(spoken(chunk.time, chunk.number, line))
        if rest:
            since = before.time if before and not whole else chunk.time
            self._rests[chunk.number] = Chunk(since, chunk.number, rest)

    def _entry(self, line: Said) -> Iterator[bytes]:
        """One, or for a very long line several."""
        for start in range(0, max(1, len(line.text)), PIECE):
            self._count += 1
            entry = {
                "timestamp": rfc3339(line.time),
                "severity": line.severity,
                "insertId": f"{self._prefix}-{self._count:010d}",
                # Not a textPayload: an empty one is none, and an empty line is a line.
                "jsonPayload": {"message": line.text[start : start + PIECE]},
            }
            yield json.dumps(entry, ensure_ascii=False).encode()


def batches(entries: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Requests' worth of entries."""
    batch: list[bytes] = []
    size = 0
    for entry in entries:
        if batch and (len(batch) >= ENTRIES or size + len(entry) > REQUEST):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += len(entry) + 1
    if batch:
        yield batch


def spoken(time: int, number: int, line: bytes) -> Said:
    """A line as a terminal shows it when it was written over and over; severities are as Vertex AI's."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return Said(time, "ERROR" if number == 2 else "INFO", shown.decode("utf-8", "replace"))


def rfc3339(time: int) -> str:
    """Unix nanoseconds as RFC 3339."""
    whole, rest = divmod(time, SECOND)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
