"""Write the rows of a run as JSON lines, in numbered parts that are written once, and pass them on to loggers.

A thread writes them; `launch_train.metrics` is the API for scripts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, Final

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder, Storage, UnreachableError, open_storage
from launch_train.telemetry.logger_process import CLOSE_SECONDS, LoggerProcess
from launch_train.telemetry.rows import Row, plain_row
from launch_train.telemetry.tensorboard import Board, open_board
from launch_train.telemetry.upload_queue import Outbox, open_outbox

FLUSH_SECONDS = 3.0
"""Seconds after which rows are sent at the latest. Each part costs a request."""

LIST_SECONDS = 20.0
"""Limit of listing the existing parts. Without an answer, a part whose name is taken gets another name."""

QUEUE_BLOCKS = 256
"""Blocks of rows that may wait for the local disk. Beyond that, training waits too, to bound the memory."""

FULL_SECONDS = 0.01
"""Poll interval of a full queue."""

END_SECONDS = 600.0
"""Time limit of waiting for an unreachable bucket at the end of a run."""

EVERY_SECONDS: Final = 30.0
"""Shortest time between two uploads of the newest row: each costs a request."""

PartName = Callable[[int], str]
"""Returns the name of a part, given its number."""


class Sink:
    """A destination of rows. This one discards them: on other ranks, and in runs without a folder."""

    def put(self, rows: Sequence[Row]) -> None:
        """Queue rows; cheap. Raises errors of the local disk. An unreachable bucket is only reported on stderr."""

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether all queued rows are durable in the run folder.

        May be called from any thread while others put rows.
        """
        return True

    def close(self, limit: float | None = None, *, failed: bool = False) -> None:
        """Write the remaining rows, and raise the error of a failed write. `failed`: the program has failed.

        Waits at most `limit` seconds (default: END_SECONDS); then OutputError says how much is left, and where. It may
        be called again. In a forked process it does nothing: the sink belongs to the parent.
        """


def open_sink(env: Mapping[str, str], loggers: Sequence[str] | None = None) -> Sink:
    """Open the sink of this process: the run folder on global rank 0, Null elsewhere. Raises OutputError.

    `loggers`: names of contract.LOGGER_NAMES; None: those of `env`.
    """
    # Rank 0 under torchrun, or else the process of node 0.
    if not env.get(contract.RUN_FOLDER) or int(env.get("RANK") or env.get(contract.NODE) or 0):
        return Sink()
    names = wanted_loggers(env) if loggers is None else loggers
    storage = open_storage(env[contract.RUN_FOLDER])
    outbox, attempt = open_outbox(storage, env), int(env.get(contract.ATTEMPT) or 1)
    board = None
    if not {"tensorboard", "vertex"}.isdisjoint(names):
        board = open_board(storage, outbox, runfolder.start_name(attempt, int(env.get(contract.GENERATION) or 0)))
    newest = None if isinstance(storage, LocalFolder) else NewestRow(outbox, attempt)
    logging, services = None, [name for name in names if name in ("wandb", "mlflow")]
    if services:  # other services, which get the rows from a process of their own
        try:
            logging = LoggerProcess(services, env)
        except OSError as error:
            say(f"warning: {', '.join(names)} not started: {error}")
    return MetricsWriter(storage, outbox, part_names(env), board, newest=newest, loggers=logging)


def wanted_loggers(env: Mapping[str, str]) -> Sequence[str]:
    """Return the loggers of a script's spec."""
    return env[contract.LOGGERS].split(",") if contract.LOGGERS in env else contract.DEFAULT_LOGGERS


def part_names(env: Mapping[str, str], name: Callable[..., str] = runfolder.metrics_part) -> PartName:
    """Return a function from the number of a part to its name, for this node and start."""
    defaults = ((contract.ATTEMPT, 1), (contract.GENERATION, 0), (contract.NODE, 0))
    attempt, generation, node = (int(env.get(number) or default) for number, default in defaults)
    return lambda part: name(attempt, generation, node, part)


@dataclass(frozen=True)
class _Marker:
    """An entry in the queue: its sender waits until the rows before it are written; `last`: none follow."""

    last: bool = False
    done: Event = field(default_factory=Event)


class NewestRow:
    """Keeps `progress.json` up to date: the newest row of one start of the processes, the only metrics that a list of
    runs reads. A failure affects only this object."""

    def __init__(self, outbox: Outbox, attempt: int) -> None:
        self._outbox, self._attempt = outbox, attempt
        self._steps: Any = None
        self._row: Row | None = None
        """The newest row, unless it was written."""
        self._due = float("-inf")

    def add(self, rows: Sequence[Row]) -> None:
        """Record rows, and upload the newest one if that is due."""
        for row in rows:
            if row.get("event") == "start":
                config = row.get("config")
                self._steps = row.get("steps") or (config.get("steps") if isinstance(config, Mapping) else None)
            elif "event" not in row and "step" in row:
                self._row = row
        if time.monotonic() >= self._due:
            self.write()

    def write(self) -> None:
        """Upload the newest row unless it is uploaded already."""
        if self._row is None:
            return
        row, self._row = self._row, None
        self._due = time.monotonic() + EVERY_SECONDS
        record = {"attempt": self._attempt, "steps": self._steps, "row": plain_row(row)}
        with suppress(OutputError):
            self._outbox.replace(runfolder.PROGRESS, json.dumps(record, allow_nan=False).encode())


Queue = SimpleQueue[Sequence[Row] | _Marker]


class MetricsWriter(Sink):
    """Writes rows from a thread: as create-only parts of JSON lines, to TensorBoard, to the loggers' process, and the
    `newest` one. One part holds the rows of `seconds` (default: FLUSH_SECONDS)."""

    def __init__(
        self,
        storage: Storage,
        outbox: Outbox,
        name: PartName,
        board: Board | None = None,
        seconds: float | None = None,
        newest: NewestRow | None = None,
        loggers: LoggerProcess | None = None,
    ) -> None:
        self._storage, self._outbox, self._name, self._board = storage, outbox, name, board
        self._newest, self._loggers = newest, loggers
        self._seconds = seconds
        self._pid = os.getpid()
        self._part: int | None = None
        # SimpleQueue is reentrant: a signal handler may call put() while it interrupts one.
        self._queue: Queue = SimpleQueue()
        self._error: Exception | None = None
        self._failed = False
        # A daemon thread, so that a process that fails elsewhere can exit; `close` waits for it.
        self._thread = Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def put(self, rows: Sequence[Row]) -> None:
        while self._error is None and self._queue.qsize() >= QUEUE_BLOCKS:
            time.sleep(FULL_SECONDS)
        if self._error is not None:
            raise self._error
        self._queue.put(rows)

    def flush(self, seconds: float) -> bool:
        until, mark = time.monotonic() + seconds, _Marker()
        if self._thread.is_alive():
            self._queue.put(mark)
            if not mark.done.wait(seconds):
                return False
        return not self._failed and self._outbox.wait(max(0.0, until - time.monotonic()))

    def close(self, limit: float | None = None, *, failed: bool = False) -> None:
        if os.getpid() != self._pid:
            return
        until = time.monotonic() + (END_SECONDS if limit is None else limit)
        if self._thread.is_alive():
            self._queue.put(_Marker(last=True))
            self._thread.join(max(0.0, until - time.monotonic()))
        if self._loggers:
            self._loggers.finish(max(0.0, min(CLOSE_SECONDS, until - time.monotonic())), failed=failed)
        error, self._error = self._error, None
        try:
            self._outbox.close(max(0.0, until - time.monotonic()))
        finally:
            if self._loggers:
                self._loggers.close()
            if error:
                raise error
        if self._thread.is_alive():
            raise OutputError(f"the last rows could not be written to {self._storage.url} in time")

    def _run(self) -> None:
        """Write until the last marker.

        After an error, keep draining the queue so that `flush` and `close` do not block; the next `put` raises it.
        """
        last = False
        while not last:
            rows, mark = _next_rows(self._queue, self._seconds)
            try:
                if rows and not self._failed:
                    self._write(rows)
                    self._write_events(rows)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that trains
                self._failed, self._error = True, error
            if mark:
                last = mark.last
                if last:
                    self._write_events(None)
                    if self._newest and not self._failed:
                        self._newest.write()
                mark.done.set()

    def _write_events(self, rows: Sequence[Row] | None) -> None:
        """Write the rows to TensorBoard; None closes it. An error disables TensorBoard with a warning: the rows
        themselves are safe."""
        try:
            if self._board and rows is None:
                self._board.close()
            elif self._board and rows:
                self._board.add(rows)
        except Exception as error:  # noqa: BLE001 - any error of an optional output
            self._board = None
            print(f"TensorBoard disabled, no more events are written: {error}", file=sys.stderr, flush=True)

    def _write(self, rows: Sequence[Row]) -> None:
        """Write one part. A process that restarted under the same numbers continues after the existing parts."""
        if self._part is None:
            self._part = 0
            with suppress(UnreachableError):
                self._part = runfolder.next_part(self._storage.within(LIST_SECONDS), self._name(0))
        data = "".join(json.dumps(plain_row(row), allow_nan=False) + "\n" for row in rows).encode()
        self._outbox.put(self._name(self._part), data)
        self._part += 1
        if self._newest:
            self._newest.add(rows)
        if self._loggers:
            self._loggers.write(data, len(rows))


def _next_rows(queue: Queue, seconds: float | None = None) -> tuple[list[Row], _Marker | None]:
    """Wait for rows; return them with all that follow within `seconds` of the first, or up to the next marker."""
    rows: list[Row] = []
    item = queue.get()
    until = time.monotonic() + (FLUSH_SECONDS if seconds is None else seconds)
    while not isinstance(item, _Marker):
        rows += item
        try:
            item = queue.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return rows, None
    return rows, item
