"""A logging service, and its thread: a bounded queue of rows, retries, and the count of rows that were not logged."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final, Literal, Protocol, TypeVar

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.backoff import Backoff
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.common.masking import mask, mask_message
from launch_train.common.storage import open_storage
from launch_train.common.text import plural
from launch_train.telemetry.rows import Row, scalars
from launch_train.telemetry.upload_queue import MIN_INTERVAL_SECONDS

State = Literal["finished", "failed", "preempted"]
"""How a start of the run ended. A failed or preempted run may be resumed."""

READ_SECONDS = 20.0
"""Time limit of reading the spec from the run folder."""

QUEUE_ROWS: Final = 50_000
"""Rows that may wait for a service; beyond that, the oldest are dropped. About 50 MB."""
BLOCK_ROWS: Final = 500
"""Rows that a service gets at once."""
FIRST_WAIT, LONGEST_WAIT, LAST_WAIT = 1.0, 60.0, 0.2
"""First and longest wait between two tries, and the one at the end of the run, in seconds."""

LAST_TRIES: Final = 4
"""Failed calls after the end of the run before giving up."""

T = TypeVar("T")


class RefusedError(Exception):
    """The service refuses these rows; a retry would not help."""


class Service(Protocol):
    """One run of a logging service. Any error but RefusedError counts as an outage: the call is repeated."""

    def configure(self, config: Mapping[str, Any]) -> None:
        """Add settings of the run; some may have been added before."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows of steps and evaluations; the repeated steps of a resumed run are left out."""

    def finish(self, state: State) -> None:
        """End the run. May take long: the process exits when its time is over."""


@dataclass(frozen=True)
class RunInfo:
    """The run, as described to all loggers. `spec`: its settings, with secrets masked."""

    id: str
    folder: str
    env: Mapping[str, str] = field(repr=False)
    spec: Mapping[str, Any] = field(default_factory=dict)


def row_time(row: Row) -> float:
    """Return the Unix time of a row; the current time if a script's event has another value under that name."""
    moment = row.get("time")
    return float(moment) if isinstance(moment, (int, float)) else time.time()


def run_info(env: Mapping[str, str]) -> RunInfo:
    """Return the run, with the spec from its folder; without a spec if the folder can't be read."""
    folder = env[contract.RUN_FOLDER]
    name = env.get(contract.RUN) or folder.rstrip("/").rpartition("/")[2]
    try:
        spec = json.loads(open_storage(folder).within(READ_SECONDS).read(runfolder.PLAN))["spec"]
        spec.get("run", {}).pop("config", None)  # the trainer reports it with its defaults
    except (OutputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        spec = {}
    return RunInfo(name, folder, env, mask(spec))


class LoggerFeed:
    """Opens a service and sends it the rows, in order, on its own thread."""

    def __init__(self, name: str, open_service: Callable[[], Service], env: Mapping[str, str]) -> None:
        self._name, self._open, self._env = name, open_service, env
        self._queue: deque[Row] = deque()
        self._block: list[Row] = []
        """Rows that the service is about to log."""
        self._news = threading.Condition()
        self._ended: State | None = None
        self._refused = False
        self._lost = 0
        self._backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)
        self._last_tries = LAST_TRIES
        self._warned = -inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, row: Row) -> None:
        """Queue a row; drop the oldest one if the queue is full."""
        with self._news:
            if len(self._queue) >= QUEUE_ROWS:
                self._lost += _is_logged(self._queue.popleft())
            if self._refused:
                self._lost += _is_logged(row)
            else:
                self._queue.append(row)
                self._news.notify_all()

    def end(self, state: State) -> None:
        """End the run of the service after the rows so far. Only the first call counts."""
        with self._news:
            self._ended = self._ended or state
            self._news.notify_all()

    def join(self, until: float) -> None:
        """Wait until time.monotonic() reaches `until` at most, and report the rows that were not logged."""
        self._thread.join(max(0.0, until - time.monotonic()))
        with self._news:
            lost = self._lost + sum(map(_is_logged, (*self._block, *self._queue)))
        if lost:
            say(f"warning: {self._name}: {plural(lost, 'row')} not logged; the run folder has them")

    def _run(self) -> None:
        service = self._retry(self._open)
        if service is None:
            with self._news:
                self._refused = True
                self._lost += sum(map(_is_logged, self._queue))
                self._queue.clear()
            return
        while self._take_block():
            for row in self._block:
                if row.get("event") == "start" and isinstance(row.get("config"), Mapping):
                    self._retry(partial(service.configure, mask(row["config"])))
            if rows := [row for row in self._block if _is_logged(row)]:
                self._retry(partial(service.log, rows), len(rows))
            with self._news:
                self._block = []
        if self._ended:
            self._retry(partial(service.finish, self._ended))

    def _take_block(self) -> bool:
        """Wait for rows and take them; return False at the end."""
        with self._news:
            self._news.wait_for(lambda: self._queue or self._ended)
            self._block = [self._queue.popleft() for _ in range(min(BLOCK_ROWS, len(self._queue)))]
            return bool(self._block)

    def _retry(self, call: Callable[[], T], rows: int = 0) -> T | None:
        """Repeat a call until it succeeds. Return None if the service refuses it or the run is over: its `rows` are
        lost."""
        while True:
            try:
                done = call()
            except (RefusedError, ImportError) as error:
                self._warn(error, "")
                break
            except Exception as error:  # noqa: BLE001 - whatever fails in a logger, training continues
                self._warn(error, "; retrying")
                if not self._pause():
                    break
            else:
                self._backoff.reset()
                return done
        with self._news:
            self._lost += rows
        return None

    def _pause(self) -> bool:
        """Wait before the next try, at the end of the run only briefly. Return False if none is left."""
        with self._news:
            ended = self._news.wait_for(lambda: self._ended, 0.0 if self._ended else self._backoff.wait())
        if ended:
            self._last_tries -= 1
            time.sleep(LAST_WAIT)
        return self._last_tries > 0

    def _warn(self, error: Exception, then: str) -> None:
        """Report an error in one line, at most once a minute."""
        now = time.monotonic()
        if now - self._warned >= MIN_INTERVAL_SECONDS:
            self._warned = now
            what = mask_message(str(error).rstrip(". ") or type(error).__name__, self._env)
            say(f"warning: {self._name}: {what}. Training continues; the run folder has all rows{then}")


def _is_logged(row: Row) -> bool:
    """Return whether a row has values for a logger. A script may log an event with any step."""
    return type(row.get("step")) is int and bool(scalars(row))
