"""What the machine does beside training: its GPUs by NVML, its CPUs, memory, disk and network.

One process of each node looks now and then, from a thread: the trainer's first one there, or the node's own beside a
user's script or command. A look is a row of `time` (Unix seconds), `host` (host.py) and `gpus` (a list, nvml.py); the
rows are in `monitor/` of the run folder, a part a minute for each node. What the user should know at once is a line on
stderr (alarms.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, Final, Protocol

from launch_train.common import contract
from launch_train.common.storage import open_storage
from launch_train.monitoring.alerts import Alarms
from launch_train.monitoring.bounded_call import Aside
from launch_train.monitoring.summary import Sums
from launch_train.telemetry.metric_sink import Null, Parts, Sink, part_names
from launch_train.telemetry.rows import Row
from launch_train.telemetry.throttled_warning import say
from launch_train.telemetry.upload_queue import open_outbox

PART_SECONDS: Final = 60.0
"""Rows of so long go into one part, which costs a request: a process that is killed loses them."""

ANSWER_SECONDS: Final = 1.0
"""For the host's and for the GPUs' part of a look. Either may hang (a disk on the network, a driver) or fail: the look
is then the other's alone."""

CLOSE_SECONDS: Final = 1.0
"""What is not sent by then lies on the disk, for the node to send."""


class Monitor(Protocol):
    """Looks at this node now and then, from a thread."""

    def facts(self) -> dict[str, Any]:
        """What it has seen, for the end event."""

    def close(self) -> None:
        """Look no more, and write what is left."""


class Process(Protocol):
    """Which one of a run looks."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...


class Off:
    """Looks at nothing."""

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def open_monitor(seconds: float, ranks: Process, env: Mapping[str, str], events: Sink | None = None) -> Monitor:
    """The monitor of this process: one a node, every so many seconds (0: none). `events` is where rank 0 of all reports
    errors of GPUs; other nodes write parts of their own. Nothing is opened before the first look."""
    if not seconds or ranks.local_rank:
        return Off()
    node = int(env.get(contract.NODE) or 0)
    host = Aside(_lazily(partial(_open_host, env)), "host")
    gpus = Aside(_lazily(partial(_open_gpus, env)), "gpus")
    rows, own = Late(partial(_parts, env, contract.monitor_part, PART_SECONDS)), Late(partial(_parts, env))
    return Watch(seconds, node, host, gpus, rows, events if events and ranks.rank == 0 else own)


class Eye(Protocol):
    """Looks at something."""

    def look(self) -> Any: ...


def _lazily(opening: Callable[[], Eye | None]) -> Callable[[], Any]:
    """A look at what the first look opens; None where there is nothing to open."""
    opened = cache(opening)

    def look() -> Any:
        return None if (eye := opened()) is None else eye.look()

    return look


def _open_gpus(env: Mapping[str, str]) -> Eye | None:
    from launch_train.monitoring.nvml import (
        open_gpus,  # with the libraries that they need: none of it delays the first step
    )

    return open_gpus(env)


def _open_host(env: Mapping[str, str]) -> Eye | None:
    from launch_train.monitoring.host import open_host

    return open_host(_scratch(env), _root(env))


def _scratch(env: Mapping[str, str]) -> Path:
    """What must not run full: the run folder if it is on this machine, else where that waits which will be sent."""
    wanted = [env.get(contract.RUN_FOLDER) or "", env.get(contract.SPOOL) or ""]
    return next((Path(path) for path in wanted if path and Path(path).is_dir()), Path(tempfile.gettempdir()))


def _root(env: Mapping[str, str]) -> int:
    """The process all others of the run on this node come from: torchrun's, under torchrun."""
    return os.getppid() if "LOCAL_RANK" in env else os.getpid()


def _parts(
    env: Mapping[str, str],
    name: Callable[[int, int, int, int], str] = contract.metrics_part,
    seconds: float | None = None,
) -> Sink:
    if not env.get(contract.RUN_FOLDER):
        return Null()
    storage = open_storage(env[contract.RUN_FOLDER])
    return Parts(storage, open_outbox(storage, env), part_names(env, name), seconds=seconds)


class Late:
    """A sink that is opened when the first rows come. Its trouble is a line on stderr, and then it keeps nothing:
    training goes on without it."""

    def __init__(self, opening: Callable[[], Sink]) -> None:
        self._opening = opening
        self._sink: Sink | None = None

    def put(self, rows: Sequence[Row]) -> None:
        try:
            self._sink = self._sink or self._opening()
            self._sink.put(rows)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not training's
            say(f"no more of the machine's figures are written: {error}")
            self._sink = Null()

    def flush(self, seconds: float) -> bool:
        return self._sink is None or self._sink.flush(seconds)

    def close(self, limit: float | None = None) -> None:
        with suppress(Exception):  # what could not be sent lies in the spool, and the node sends it
            if self._sink:
                self._sink.close(limit)


class Watch:
    """Looks every so many seconds until it is closed."""

    def __init__(
        self,
        seconds: float,
        node: int,
        host: Aside[Row | None],
        gpus: Aside[list[Row] | None],
        rows: Sink,
        events: Sink,
    ) -> None:
        self._seconds, self._host, self._gpus = seconds, host, gpus
        self._rows, self._events = rows, events
        self._alarms, self._sums = Alarms(node), Sums()
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
            if isinstance(sink, Late):  # the other one is the run's
                sink.close(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._seconds):
                self.look()
        except Exception as error:  # noqa: BLE001 - training goes on without it
            say(f"the machine is not looked at any more: {type(error).__name__}: {error}")

    def look(self) -> None:
        """Once."""
        row = self._row()
        with self._lock:
            self._sums.add(row)
        if not self._closing.is_set():  # else nobody sends it any more
            self._rows.put([row])
        for alarm in [*self._alarms.of(row), *self._alarms.silent(self._gpus.silent())]:
            say(alarm.line)
            if alarm.event:
                with suppress(Exception):  # a sink that is broken tells the thread that trains
                    self._events.put([{"event": "gpu_error", "time": row["time"], **alarm.event}])

    def _row(self) -> Row:
        seen = {"host": self._host.answer(ANSWER_SECONDS), "gpus": self._gpus.answer(ANSWER_SECONDS)}
        return {"time": time.time(), **{name: part for name, part in seen.items() if part}}
