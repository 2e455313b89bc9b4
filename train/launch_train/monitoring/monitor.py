"""Monitor a node during training: GPUs (NVML), CPUs, memory, disk and network.

One process per node samples them from a thread: the trainer's first process there, or the node's own for a custom
script or command. A sample is a row of `time` (Unix seconds), `host` (see host.py) and `gpus` (a list, see nvml.py).
The rows are in `monitor/` of the run folder, one part per minute and node. Problems that the user should know at once
are printed on stderr (see alerts.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, Final, Generic, Protocol, TypeVar

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.console import say
from launch_train.common.storage import open_storage
from launch_train.monitoring.alerts import Alerts
from launch_train.monitoring.summary import MonitorSummary
from launch_train.telemetry.metric_sink import MetricsWriter, Sink, part_names
from launch_train.telemetry.rows import Row
from launch_train.telemetry.upload_queue import open_outbox

T = TypeVar("T")

PART_SECONDS: Final = 60.0
"""Rows of this duration form one part, which costs a request. A process that is killed loses its last part."""

FIRST_SECONDS: Final = 1.0
"""The first sample comes after so long, so that a short run has one."""

ANSWER_SECONDS: Final = 1.0
"""Time limit for the host's and for the GPUs' part of a sample. Either may hang (a network disk, a driver) or fail; the
sample then has the other part only."""

CLOSE_SECONDS: Final = 1.0
"""Time limit for closing. Rows not uploaded by then stay on disk, and the node uploads them."""


class Monitor:
    """Samples this node periodically, from a thread; this one samples nothing."""

    def facts(self) -> dict[str, Any]:
        """Return the summary for the end event."""
        return {}

    def close(self) -> None:
        """Stop sampling and write the remaining rows."""


def open_monitor(
    seconds: float, env: Mapping[str, str], events: Sink | None = None, *, rank: int = 0, local_rank: int = 0
) -> Monitor:
    """Return the monitor of this process; only the first process of a node samples, every `seconds` (0: never).

    `events`: where rank 0 reports GPU errors; other nodes write their own parts. Nothing is opened before the first
    sample.
    """
    if not seconds or local_rank:
        return Monitor()
    node = int(env.get(contract.NODE) or 0)
    host = BoundedCall(_lazily(partial(_open_host, env)), "host")
    gpus = BoundedCall(_lazily(partial(_open_gpus, env)), "gpus")
    rows, own = LazySink(partial(_parts, env, runfolder.monitor_part, PART_SECONDS)), LazySink(partial(_parts, env))
    return NodeMonitor(seconds, node, host, gpus, rows, events if events and rank == 0 else own)


class Sampler(Protocol):
    """Takes samples of the host or of its GPUs."""

    def sample(self) -> Any: ...


def _lazily(opening: Callable[[], Sampler | None]) -> Callable[[], Any]:
    """Return a function that samples and opens the sampler on its first call; its result is None without a sampler."""
    opened = cache(opening)

    def sample() -> Any:
        return None if (sampler := opened()) is None else sampler.sample()

    return sample


def _open_gpus(env: Mapping[str, str]) -> Sampler | None:
    from launch_train.monitoring.nvml import (
        open_gpus,  # imported on the thread, so that its libraries don't delay the first step
    )

    return open_gpus(env)


def _open_host(env: Mapping[str, str]) -> Sampler | None:
    from launch_train.monitoring.host import open_host

    # The disk to watch is the run folder's if it is on this machine, else the upload spool's.
    folders = [env.get(contract.RUN_FOLDER) or "", env.get(contract.SPOOL) or ""]
    scratch = next((Path(path) for path in folders if path and Path(path).is_dir()), Path(tempfile.gettempdir()))
    # All processes of the run on this node descend from torchrun, if there is one.
    return open_host(scratch, os.getppid() if "LOCAL_RANK" in env else os.getpid())


def _parts(
    env: Mapping[str, str],
    name: Callable[[int, int, int, int], str] = runfolder.metrics_part,
    seconds: float | None = None,
) -> Sink:
    if not env.get(contract.RUN_FOLDER):
        return Sink()
    storage = open_storage(env[contract.RUN_FOLDER])
    return MetricsWriter(storage, open_outbox(storage, env), part_names(env, name), seconds=seconds)


class BoundedCall(Generic[T]):
    """Runs a call that may block forever on its own thread, one at a time. An exception counts as the result None."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[T | None] = SimpleQueue()
        self._since: float | None = None
        # A daemon: a call that hangs in a driver must not keep the process from exiting.
        Thread(target=self._run, name=name, daemon=True).start()

    def call(self, timeout: float) -> T | None:
        """Start a call unless one is running, and wait up to `timeout` seconds. None on a timeout or an exception."""
        if self._since is None:
            self._since = time.monotonic()
            self._requests.put(True)
        try:
            result = self._results.get(timeout=timeout)
        except Empty:
            return None
        self._since = None
        return result

    def blocked_seconds(self) -> float:
        """Return for how many seconds the current call has been running; 0 if none is."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def close(self) -> None:
        """End the thread after its current call."""
        self._requests.put(False)

    def _run(self) -> None:
        while self._requests.get():
            try:
                self._results.put(self._function())
            except Exception:  # noqa: BLE001 - the next call tries again
                self._results.put(None)


class LazySink(Sink):
    """A sink that is opened with the first rows. On an error it warns on stderr and drops all rows: training continues
    without it."""

    def __init__(self, opening: Callable[[], Sink]) -> None:
        self._opening = opening
        self._sink: Sink | None = None

    def put(self, rows: Sequence[Row]) -> None:
        try:
            self._sink = self._sink or self._opening()
            self._sink.put(rows)
        except Exception as error:  # noqa: BLE001 - a monitoring error must not end training
            say(f"warning: machine metrics are no longer written: {error}")
            self._sink = Sink()

    def flush(self, seconds: float) -> bool:
        return self._sink is None or self._sink.flush(seconds)

    def close(self, limit: float | None = None, *, failed: bool = False) -> None:
        with suppress(Exception):  # the node uploads what remains in the spool
            if self._sink:
                self._sink.close(limit)


class NodeMonitor(Monitor):
    """Samples after FIRST_SECONDS and then every `seconds` until closed."""

    def __init__(
        self,
        seconds: float,
        node: int,
        host: BoundedCall[Row | None],
        gpus: BoundedCall[list[Row] | None],
        rows: Sink,
        events: Sink,
    ) -> None:
        self._seconds, self._host, self._gpus = seconds, host, gpus
        self._rows, self._events = rows, events
        self._alarms, self._sums = Alerts(node), MonitorSummary()
        self._closing, self._lock, self._pid = Event(), Lock(), os.getpid()
        self._thread = Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any]:
        with self._lock:
            facts = self._sums.facts()
        return {"monitor": facts} if facts else {}

    def close(self) -> None:
        if os.getpid() != self._pid or self._closing.is_set():
            return
        until = time.monotonic() + CLOSE_SECONDS
        self._closing.set()
        self._host.close()
        self._gpus.close()
        self._thread.join(CLOSE_SECONDS / 2)
        for sink in (self._rows, self._events):
            if isinstance(sink, LazySink):  # else it belongs to the run
                sink.close(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        try:
            seconds = min(self._seconds, FIRST_SECONDS)
            while not self._closing.wait(seconds):
                self.sample()
                seconds = self._seconds
        except Exception as error:  # noqa: BLE001 - training continues without monitoring
            say(f"warning: machine monitoring has stopped: {type(error).__name__}: {error}")

    def sample(self) -> None:
        """Take one sample, write it, and print new alerts."""
        row = self._row()
        with self._lock:
            self._sums.add(row)
        if not self._closing.is_set():  # rows put after closing would not be uploaded
            self._rows.put([row])
        for alarm in [*self._alarms.check(row), *self._alarms.check_driver(self._gpus.blocked_seconds())]:
            say(alarm.line)
            if alarm.event:
                with suppress(Exception):  # the training thread reports a broken sink
                    self._events.put([{"event": "gpu_error", "time": row["time"], **alarm.event}])

    def _row(self) -> Row:
        parts = {"host": self._host.call(ANSWER_SECONDS), "gpus": self._gpus.call(ANSWER_SECONDS)}
        return {"time": time.time(), **{name: part for name, part in parts.items() if part}}
