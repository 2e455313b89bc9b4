"""Convert the output of a VM's node into Cloud Logging entries. Pure, except for the clock.

https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple

from launch_train.common import contract

SECOND: Final = 10**9
"""All times in this module are Unix nanoseconds."""
PIECE: Final = 60_000
"""Characters (up to four bytes each) after which a line is split over several entries; the limit of an entry is about
256 KB: https://cloud.google.com/logging/quotas."""
ENTRIES: Final = 1000
REQUEST: Final = 5_000_000
"""Upper bounds of entries and bytes in one request; Google's limit is 10 MB."""
REST: Final = 10 * SECOND
"""Longest wait for the end of a line. A progress bar may not end its line for hours; it becomes an entry each time."""
LONGEST_REST: Final = 1 << 16


@dataclass(frozen=True)
class LogSource:
    """Origin of entries: the labels of the resource (a gce_instance) and the labels of each entry."""

    project: str
    resource: Mapping[str, str]
    labels: Mapping[str, str]

    @property
    def instance(self) -> str:
        """Return the VM's numeric id."""
        return self.resource["instance_id"]

    def head(self) -> dict[str, Any]:
        """Return the fields that all entries of a request share."""
        return {
            "logName": f"projects/{self.project}/logs/{contract.LOG}",
            "resource": {"type": "gce_instance", "labels": dict(self.resource)},
            "labels": dict(self.labels),
            "partialSuccess": True,
        }


class Chunk(NamedTuple):
    """Bytes written to file descriptor `number` (1 or 2) at `time`."""

    time: int
    number: int
    data: bytes


class LogLine(NamedTuple):
    """A line without its newline."""

    time: int
    severity: str
    text: str


class Entries:
    """Converts chunks into entries.

    Each has a unique id: Cloud Logging drops duplicates, and orders entries of the same time by id.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._rests: dict[int, Chunk] = {}

    def made(self, chunks: Iterable[Chunk], missed: int = 0, *, last: bool) -> Iterator[bytes]:
        """Yield entries as JSON. An incomplete line is held until it ends, until REST has passed, or until `last`."""
        if missed:
            text = f"launch: {missed} lines are missing here: Cloud Logging took them too slowly"
            yield from self._entry(LogLine(time.time_ns(), "WARNING", text))
        for chunk in chunks:
            yield from self._lines(chunk)
        for number, rest in list(self._rests.items()):
            if last or time.time_ns() - rest.time >= REST or len(rest.data) >= LONGEST_REST:
                del self._rests[number]
                yield from self._entry(parse_line(rest.time, number, rest.data))

    def _lines(self, chunk: Chunk) -> Iterator[bytes]:
        before = self._rests.pop(chunk.number, None)
        *whole, rest = ((before.data if before else b"") + chunk.data).split(b"\n")
        for line in whole:
            yield from self._entry(parse_line(chunk.time, chunk.number, line))
        if rest:
            since = before.time if before and not whole else chunk.time
            self._rests[chunk.number] = Chunk(since, chunk.number, rest)

    def _entry(self, line: LogLine) -> Iterator[bytes]:
        """Yield one entry, or several for a very long line."""
        for start in range(0, max(1, len(line.text)), PIECE):
            self._count += 1
            entry = {
                "timestamp": rfc3339(line.time),
                "severity": line.severity,
                "insertId": f"{self._prefix}-{self._count:010d}",
                # jsonPayload, because Cloud Logging treats an empty textPayload as missing, and would lose empty lines.
                "jsonPayload": {"message": line.text[start : start + PIECE]},
            }
            yield json.dumps(entry, ensure_ascii=False).encode()


def batches(entries: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Group entries into requests of at most ENTRIES entries and about REQUEST bytes."""
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


def parse_line(time: int, number: int, line: bytes) -> LogLine:
    """Return the text after the last carriage return, as a terminal shows it. Severities are those of Vertex AI."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return LogLine(time, "ERROR" if number == 2 else "INFO", shown.decode("utf-8", "replace"))


def rfc3339(time: int) -> str:
    """Format Unix nanoseconds as RFC 3339."""
    whole, rest = divmod(time, SECOND)
    return f"{datetime.fromtimestamp(whole, timezone.utc):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
