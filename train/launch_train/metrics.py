"""The metrics of a run: JSON lines in numbered parts that are written once, and TensorBoard events, from a thread.

A script of your own needs two lines, under torchrun or not; without a run folder they do nothing:

    from train import metrics
    metrics.log(step, loss=loss.item(), lr=lr)
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import FrameType
from typing import Any, Protocol

from launch_train.common import contract, faults
from launch_train.common.errors import OutputError
from launch_train.common.heartbeat import Heartbeat
from launch_train.common.storage import Storage, UnreachableError, open_storage
from launch_train.telemetry.rows import Row, plain, whole
from launch_train.telemetry.tensorboard import Board, open_board
from launch_train.telemetry.throttled_warning import say
from launch_train.telemetry.upload_queue import Outbox, open_outbox

FLUSH_SECONDS = 3.0
"""Rows are sent at most this much later: each part costs a request."""

LIST_SECONDS = 20.0
"""For the question which parts are there already. Without an answer a part that meets another gets another name."""

QUEUE_BLOCKS = 256
"""Blocks of rows that may wait for this machine's disk; then training waits too, rather than filling the memory."""

FULL_SECONDS = 0.01
"""Between two looks at a full queue."""

LAST_SECONDS = 10.0
"""How long a script that was told to stop waits for its rows to be written."""

END_SECONDS = 600.0
"""How long a run that has ended waits for a bucket that can't be reached."""


Names = Callable[[int], str]
"""A part's name by its number."""


class Sink(Protocol):
    """Where rows go."""

    def put(self, rows: Sequence[Row]) -> None:
        """Take rows. Cheap. Raises what a disk of this machine met; a bucket's trouble is a line on stderr."""

    def flush(self, seconds: float) -> bool:
        """Whether all rows that were put are in the run folder for good, after so many seconds at most. For any
        thread, while others put."""

    def close(self, limit: float | None = None) -> None:
        """Write what is left, and raise the error that a write met. Waits no longer than `limit` seconds, END_SECONDS
        if not given; then OutputError says how much is left, and where. May be called again. In a process that was
        forked it does nothing: the sink is its parent's."""


class Null:
    """Takes everything and keeps nothing: other ranks, and runs without a folder."""

    def put(self, rows: Sequence[Row]) -> None: ...

    def flush(self, seconds: float) -> bool:
        return True

    def close(self, limit: float | None = None) -> None: ...


def open_sink(env: Mapping[str, str], *, tensorboard: bool = True) -> Sink:
    """The sink of this process: the run folder of `env` on rank 0 of all, nothing elsewhere. Raises OutputError."""
    if not env.get(contract.RUN_FOLDER) or not _speaks(env):
        return Null()
    storage = open_storage(env[contract.RUN_FOLDER])
    outbox, (attempt, generation, _) = open_outbox(storage, env), _numbers(env)
    board = open_board(storage, outbox, contract.start_name(attempt, generation)) if tensorboard else None
    return Parts(storage, outbox, part_names(env), board)


def _speaks(env: Mapping[str, str]) -> bool:
    """Rank 0 under torchrun; else the one process of node 0."""
    return int(env.get("RANK") or env.get(contract.NODE) or 0) == 0


def part_names(env: Mapping[str, str], name: Callable[..., str] = contract.metrics_part) -> Names:
    """The names of the parts that this node writes in this start."""
    attempt, generation, node = _numbers(env)
    return lambda part: name(attempt, generation, node, part)


def _numbers(env: Mapping[str, str]) -> tuple[int, int, int]:
    """Attempt, generation and node."""
    attempt, generation, node = (int(env.get(name) or start) for name, start in _FIRST)
    return attempt, generation, node


_FIRST = ((contract.ATTEMPT, 1), (contract.GENERATION, 0), (contract.NODE, 0))


@dataclass(frozen=True)
class _Mark:
    """Among the rows: whoever waits for those before it, and whether none come after it."""

    last: bool = False
    done: Event = field(default_factory=Event)


Queue = SimpleQueue[Sequence[Row] | _Mark]


class Parts:
    """Writes rows as create-only parts of JSON lines, of so many `seconds` each, and to TensorBoard, from a thread."""

    def __init__(
        self, storage: Storage, outbox: Outbox, name: Names, board: Board | None = None, seconds: float | None = None
    ) -> None:
        self._storage, self._outbox, self._name, self._board = storage, outbox, name, board
        self._seconds = seconds
        self._pid = os.getpid()
        self._part: int | None = None
        # A simple queue has no lock that a signal handler could find taken by the put() which it interrupted.
        self._queue: Queue = SimpleQueue()
        self._error: Exception | None = None
        self._failed = False
        # A daemon, so that a process which fails elsewhere can end; `close` is what waits for it.
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def put(self, rows: Sequence[Row]) -> None:
        while self._error is None and self._queue.qsize() >= QUEUE_BLOCKS:
            time.sleep(FULL_SECONDS)
        if self._error is not None:
            raise self._error
        self._queue.put(rows)

    def flush(self, seconds: float) -> bool:
        until, mark = time.monotonic() + seconds, _Mark()
        if self._thread.is_alive():
            self._queue.put(mark)
            if not mark.done.wait(seconds):
                return False
        return not self._failed and self._outbox.wait(max(0.0, until - time.monotonic()))

    def close(self, limit: float | None = None) -> None:
        if os.getpid() != self._pid:
            return
        until = time.monotonic() + (END_SECONDS if limit is None else limit)
        if self._thread.is_alive():
            self._queue.put(_Mark(last=True))
            self._thread.join(max(0.0, until - time.monotonic()))
        error, self._error = self._error, None
        try:
            self._outbox.close(max(0.0, until - time.monotonic()))
        finally:
            if error:
                raise error
        if self._thread.is_alive():
            raise OutputError(f"the last rows could not be written to {self._storage.url} in time")

    def _run(self) -> None:
        """After an error the queue is still emptied, so that nobody waits for ever; the next `put` raises it."""
        last = False
        while not last:
            rows, mark = _collect(self._queue, self._seconds)
            self._write_unless_failed(rows)
            if mark:
                last = mark.last
                if last:
                    self._draw(None)
                mark.done.set()

    def _write_unless_failed(self, rows: Sequence[Row]) -> None:
        try:
            if rows and not self._failed:
                self._write(rows)
                self._draw(rows)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that trains
            self._failed, self._error = True, error

    def _draw(self, rows: Sequence[Row] | None) -> None:
        """TensorBoard is an extra: its trouble is a warning and no more curves, not the end of the run. None closes."""
        try:
            if self._board and rows is None:
                self._board.close()
            elif self._board and rows:
                self._board.add(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rows themselves are safe
            self._board = None
            print(f"no more TensorBoard events are written: {error}", file=sys.stderr, flush=True)

    def _write(self, rows: Sequence[Row]) -> None:
        """One part. A process that started again under the same numbers goes on behind the parts that are there."""
        if self._part is None:
            self._part = _first_free(self._storage, self._name)
        data = "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows).encode()
        self._outbox.put(self._name(self._part), data)
        self._part += 1


def _first_free(storage: Storage, name: Names) -> int:
    """The number behind those of the parts that are there."""
    begin = name(0).rpartition("-")[0] + "-"
    try:
        names = storage.within(LIST_SECONDS).list(begin)
    except UnreachableError:
        return 0
    numbers = (re.match(r"\d+", name.removeprefix(begin)) for name in names)
    return max((int(number[0]) + 1 for number in numbers if number), default=0)


def _collect(queue: Queue, seconds: float | None = None) -> tuple[list[Row], _Mark | None]:
    """The next rows, and all that come within so many seconds of the first or until the next mark."""
    rows: list[Row] = []
    item = queue.get()
    until = time.monotonic() + (FLUSH_SECONDS if seconds is None else seconds)
    while not isinstance(item, _Mark):
        rows += item
        try:
            item = queue.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return rows, None
    return rows, item


# --- For a script of your own ---------------------------------------------------------------------------------------


def log(step: int, **values: Any) -> None:
    """One row for `step` (from 1). Values are numbers; a tensor is read at once, which waits for its device.

    In a process that was forked from one that logs, rows go to parts of their own, and to no TensorBoard: its events
    would take back the curves of the parent.

    Raises TypeError if `step` is no whole number.
    """
    done, row = whole(step), plain(values)
    _default().put([{"step": done, "time": time.time(), **row}])
    _warn_once(done, contract.nonfinite(row))
    faults.reached(done)
    if silence := os.environ.get(contract.HANG_AFTER):
        _heartbeat().expect(float(silence))


def event(name: str, **fields: Any) -> None:
    """Something that happened: start, eval, checkpoint, end …"""
    _default().put([{"event": name, "time": time.time(), **plain(fields)}])


def _warn_once(step: int, lost: Mapping[str, str]) -> None:
    """A line on stderr, on the rank whose rows are kept, for each value at the first step that has no number for it."""
    for name, text in lost.items():
        if name not in _warned and isinstance(_default(), Parts):
            _warned.add(name)
            say(f"warning: step {step}: {name} is {text}")


_warned: set[str] = set()


@cache
def _heartbeat() -> Heartbeat:
    return Heartbeat(os.environ)


_forked_from_a_sink = False


@cache
def _default() -> Sink:
    sink = open_sink(os.environ, tensorboard=not _forked_from_a_sink)
    atexit.register(_close, sink)
    if multiprocessing := sys.modules.get("multiprocessing.util"):  # its children leave without atexit
        multiprocessing.Finalize(None, _close, args=(sink,), exitpriority=0)
    main = threading.current_thread() is threading.main_thread()
    if isinstance(sink, Parts) and main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(_write_and_die, sink))
    return sink


def _after_fork() -> None:
    """A child has no thread that would write: it opens a sink of its own if it logs, and leaves its parent's alone."""
    global _forked_from_a_sink  # noqa: PLW0603 - of the process, as the sink is
    _forked_from_a_sink = _forked_from_a_sink or _default.cache_info().currsize > 0
    _default.cache_clear()
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, partial) and handler.func is _write_and_die:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)


def _close(sink: Sink, limit: float | None = None) -> None:
    try:
        sink.close(limit)
    except OutputError as error:
        say(str(error))


def _write_and_die(sink: Parts, signum: int, _frame: FrameType | None) -> None:
    """In place of the default action: the rows first. A script that handles the signal itself comes before us."""
    with suppress(Exception):
        _close(sink, LAST_SECONDS)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
