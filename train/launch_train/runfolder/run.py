"""Read what a run folder says of its run: plan, attempts, metrics by step, events and samples of the machines."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final

from launch_train import runfolder
from launch_train.common.errors import TrainError
from launch_train.common.storage import Storage
from launch_train.runfolder import Part
from launch_train.runfolder.starts import READERS, Record, RunMetrics, Start, is_number

ENTRY: Final = re.compile(rf"^{runfolder.ATTEMPTS}/(\d+)(\.end|\.verdict)?\.json$")

LAST_PARTS: Final = 5
"""The last parts of a start that are read of a long run; the very last may have events alone: an evaluation, samples,
the end."""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt: what the launcher recorded when it asked for the machine (`entry`), and when it ended (`end`)."""

    number: int
    entry: Record
    end: Record


@dataclass(frozen=True)
class RunData(RunMetrics):
    """A run, as its folder has it. `problems`: files that could not be read."""

    id: str = ""
    folder: str = ""
    plan: Record = field(default_factory=dict)
    attempts: tuple[AttemptRecord, ...] = ()
    monitor: Mapping[int, Sequence[Record]] = field(default_factory=dict)
    """Samples of each node, in order of time."""
    problems: tuple[str, ...] = ()
    is_running: bool | None = None
    """None: unknown."""

    @cached_property
    def begin(self) -> float:
        """Return the Unix time from which the run's time is counted: its first record. 0: none has a time."""
        times: list[Any] = [event.get("time") for event in self.events]
        times += [samples[0]["time"] for samples in self.monitor.values() if samples]
        times += [min(filter(math.isfinite, start.rows.times), default=math.nan) for start in self.starts]
        return min(map(float, filter(is_number, times)), default=0.0)


def read_run(storage: Storage, *, ends_only: bool = False) -> RunData:
    """Read a run folder. A file that is damaged or missing costs its content alone. `ends_only` reads the first and the
    last metrics of each start, and no samples of machines: enough for how a run went, and quick for a long one.

    Raises TrainError: no access.
    """
    problems: list[str] = []

    def read(name: str) -> bytes:
        try:
            return storage.read(name)
        except (OSError, TrainError) as error:
            problems.append(f"{name}: {error}")
            return b""

    parts = runfolder.parts_in_order(storage.list(f"{runfolder.METRICS}/"))
    parts = _first_and_last_parts(parts) if ends_only else parts
    samples = [] if ends_only else runfolder.parts_in_order(storage.list(f"{runfolder.MONITOR}/"))
    entries = [name for name in storage.list(f"{runfolder.ATTEMPTS}/") if ENTRY.match(name)]
    starts: dict[tuple[int, int], Start] = {}
    with ThreadPoolExecutor(READERS) as threads:
        for part, text in _in_turn(threads, read, parts):
            starts.setdefault(part[:2], Start(part[:2])).add(text)
        monitor = samples_by_node(_in_turn(threads, read, samples))
        texts = dict(zip(entries, threads.map(read, entries), strict=True))
    for start in starts.values():
        start.close()
    types = {"machine": dict, "image": dict, "attempts": list, "spec": dict}  # others can write to the folder
    values = _object(read(runfolder.PLAN)).items()
    plan: dict[str, Any] = {key: value for key, value in values if isinstance(value, types.get(key, object))}
    plan["attempts"] = [attempt for attempt in plan.get("attempts", ()) if isinstance(attempt, dict)]
    return RunData(
        starts=tuple(starts[key] for key in sorted(starts)),
        id=str(plan.get("run") or storage.url.rstrip("/").rpartition("/")[2]),
        folder=storage.url,
        plan=plan,
        attempts=_attempts(texts),
        monitor=monitor,
        problems=tuple(problems),
    )


def _in_turn(
    threads: ThreadPoolExecutor, read: Callable[[str], bytes], parts: Sequence[tuple[Part, str]]
) -> Iterator[tuple[Part, bytes]]:
    """Yield the content of each part. A few are read ahead: all of them would fill the memory."""
    ahead: deque[tuple[Part, Future[bytes]]] = deque()
    for part, name in parts:
        ahead.append((part, threads.submit(read, name)))
        if len(ahead) > READERS:
            first, future = ahead.popleft()
            yield first, future.result()
    for part, future in ahead:
        yield part, future.result()


def samples_by_node(parts: Iterable[tuple[Part, bytes]]) -> dict[int, list[Record]]:
    """Return the samples of each node in order of time, from the content of parts; those without a time are dropped."""
    nodes: dict[int, list[Record]] = {}
    for part, text in parts:
        nodes.setdefault(part.node, []).extend(row for row in runfolder.records(text) if is_number(row.get("time")))
    for samples in nodes.values():
        samples.sort(key=itemgetter("time"))
    return nodes


def _first_and_last_parts(parts: Sequence[tuple[Part, str]]) -> list[tuple[Part, str]]:
    """Return the first and the last parts of each start; `parts` are in order."""
    starts: dict[tuple[int, int], list[tuple[Part, str]]] = {}
    for part, name in parts:
        starts.setdefault(part[:2], []).append((part, name))
    return [part for start in starts.values() for part in [start[0], *start[max(1, len(start) - LAST_PARTS) :]]]


def _attempts(texts: Mapping[str, bytes]) -> tuple[AttemptRecord, ...]:
    records: dict[int, AttemptRecord] = {}
    for name, text in texts.items():
        match = ENTRY.match(name)
        assert match is not None  # noqa: S101 - only such names were read
        record = records.get(int(match[1])) or AttemptRecord(int(match[1]), {}, {})
        content = _object(text)
        records[record.number] = replace(record, end=content) if match[2] else replace(record, entry=content)
    return tuple(records[number] for number in sorted(records))


def _object(text: bytes) -> dict[str, Any]:
    return next(iter(runfolder.records(text.replace(b"\n", b" "))), {})
