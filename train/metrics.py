"""The metrics of a run: JSON lines in numbered parts that are written once, and TensorBoard events, from a thread.

A script of your own needs two lines, under torchrun or not; without a run folder they do nothing:

    from train import metrics
    metrics.log(step, loss=loss.item(), lr=lr)
"""

from __future__ import annotations

import atexit
import json
import math
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, Protocol

from train import contract
from train.storage import Storage, open_storage
from train.tensorboard import Board, open_board

Row = dict[str, Any]

FLUSH_SECONDS = 5.0
"""Rows reach the run folder at most this much later: each part costs a request."""

QUEUE_BLOCKS = 256
"""Blocks of rows that may wait for the folder; then training waits too, rather than filling the memory."""

FULL_SECONDS = 0.01
"""Between two looks at a full queue."""

LAST_SECONDS = 10.0
"""How long a script that was told to stop waits for its rows to be written."""


class Sink(Protocol):
    """Where rows go."""

    def put(self, rows: Sequence[Row]) -> None:
        """Take rows. Cheap; raises the error that an earlier write met."""

    def close(self) -> None:
        """Write what is left, and raise the error that a write met. May be called again."""


class Null:
    """Takes everything and keeps nothing: other ranks, and runs without a folder."""

    def put(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


def open_sink(env: Mapping[str, str], *, tensorboard: bool = True) -> Sink:
    """The sink of this process: the run folder of `env` on rank 0 of all, nothing elsewhere."""
    if not env.get(contract.RUN_FOLDER) or not _speaks(env):
        return Null()
    storage = open_storage(env[contract.RUN_FOLDER])
    return Parts(storage, part_names(env), open_board(storage) if tensorboard else None)


def _speaks(env: Mapping[str, str]) -> bool:
    """Rank 0 under torchrun; else the one process of node 0."""
    return int(env.get("RANK") or env.get(contract.NODE) or 0) == 0


def part_names(env: Mapping[str, str]) -> Callable[[int], str]:
    attempt, generation, node = (int(env.get(name) or start) for name, start in _NUMBERS)
    return lambda part: contract.metrics_part(attempt, generation, node, part)


_NUMBERS = ((contract.ATTEMPT, 1), (contract.GENERATION, 0), (contract.NODE, 0))


class Parts:
    """Writes rows as create-only parts of JSON lines, and to TensorBoard, from a thread of its own."""

    def __init__(self, storage: Storage, name: Callable[[int], str], board: Board | None = None) -> None:
        self._storage, self._name, self._board = storage, name, board
        self._part = 0
        # A simple queue has no lock that a signal handler could find taken by the put() which it interrupted.
        self._queue: SimpleQueue[Sequence[Row] | None] = SimpleQueue()
        self._more = True
        self._error: Exception | None = None
        # A daemon, so that a process which fails elsewhere can end; `close` is what waits for it.
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def put(self, rows: Sequence[Row]) -> None:
        while self._error is None and self._queue.qsize() >= QUEUE_BLOCKS:
            time.sleep(FULL_SECONDS)
        if self._error is not None:
            raise self._error
        self._queue.put(rows)

    def close(self, limit: float | None = None) -> None:
        """As promised by Sink; waits no longer than `limit` seconds."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(limit)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        """After an error the queue is still emptied, so that no `put` waits for ever; the next one raises it."""
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that trains
            self._error = error
            while self._more:
                self._more = self._queue.get() is not None

    def _write_all(self) -> None:
        while self._more:
            rows, self._more = _collect(self._queue)
            if rows:
                self._write(rows)
                self._draw(rows)
        self._draw(None)

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
        data = "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows).encode()
        while True:
            name = self._name(self._part)
            self._part += 1
            try:
                return self._storage.write(name, data, create=True)
            except FileExistsError:
                continue


def _collect(queue: SimpleQueue[Sequence[Row] | None]) -> tuple[list[Row], bool]:
    """All rows of the next FLUSH_SECONDS, and whether more will come."""
    rows: list[Row] = []
    until = time.monotonic() + FLUSH_SECONDS
    while (left := until - time.monotonic()) > 0:
        try:
            block = queue.get(timeout=left)
        except Empty:
            break
        if block is None:
            return rows, False
        rows += block
    return rows, True


def plain(row: Mapping[str, Any]) -> Row:
    """A row that strict JSON can hold: numbers of other kinds become float, nan and infinities null and named."""
    values = {key: _plain(value) for key, value in row.items()}
    lost = [key for key, value in values.items() if value is None and row[key] is not None]
    return {**values, **({"nonfinite": lost} if lost else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not hasattr(value, "__float__"):
        return str(value)
    number = float(value)
    return number if math.isfinite(number) else None


# --- For a script of your own ---------------------------------------------------------------------------------------


def log(step: int, **values: Any) -> None:
    """One row for `step` (from 1). Values are numbers; a tensor is read at once, which waits for its device.

    Raises TypeError if `step` is no whole number.
    """
    _default().put([{"step": _whole(step), "time": time.time(), **plain(values)}])


def _whole(step: Any) -> int:
    """Also a number of numpy's, a tensor with one, or 3.0."""
    try:
        return int(step) if float(step).is_integer() and not isinstance(step, (str, bytes)) else operator.index(step)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"metrics.log: the step must be a whole number, not {step!r}") from None


def event(name: str, **fields: Any) -> None:
    """Something that happened: start, eval, checkpoint, end …"""
    _default().put([{"event": name, "time": time.time(), **plain(fields)}])


@cache
def _default() -> Sink:
    sink = open_sink(os.environ)
    atexit.register(sink.close)
    main = threading.current_thread() is threading.main_thread()
    if isinstance(sink, Parts) and main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(_write_and_die, sink))
    return sink


def _write_and_die(sink: Parts, signum: int, _frame: FrameType | None) -> None:
    """In place of the default action: the rows first. A script that handles the signal itself comes before us."""
    with suppress(Exception):
        sink.close(LAST_SECONDS)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
