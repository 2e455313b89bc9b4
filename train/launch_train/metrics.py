"""Log the metrics of a training script to the run folder, and to TensorBoard.

A script needs two lines, under torchrun or not; without a run folder they do nothing:

    from launch_train import metrics
    metrics.log(step, loss=loss.item(), lr=lr)
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

from launch_train import runfolder
from launch_train.common import contract, faults
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.common.heartbeat import Heartbeat
from launch_train.telemetry.metric_sink import MetricsWriter, Sink, open_sink
from launch_train.telemetry.rows import plain_row, whole_step

LAST_SECONDS = 10.0
"""Time that a script gets to write its rows after SIGTERM."""


def log(step: int, **values: Any) -> None:
    """Log one row of metrics for `step` (from 1).

    Values are numbers; reading a tensor waits for its device. In a process that was forked from one that logs, rows go
    to separate parts and not to loggers: TensorBoard's new event file would hide the parent's curves.

    Raises TypeError if `step` is not a whole number.
    """
    done, row = whole_step(step), plain_row(values)
    _mark_as_logged()
    _default().put([{"step": done, "time": time.time(), **row}])
    for name, text in runfolder.nonfinite(row).items():
        if name not in _warned and isinstance(_default(), MetricsWriter):
            _warned.add(name)
            say(f"warning: step {done}: {name} is {text}")
    faults.record_step(done)
    if silence := os.environ.get(contract.HANG_AFTER):
        _heartbeat().expect(float(silence))


def event(name: str, **fields: Any) -> None:
    """Log an event, such as start, eval, checkpoint or end, with its fields."""
    _default().put([{"event": name, "time": time.time(), **plain_row(fields)}])


_warned: set[str] = set()
"""Names of the values that were not finite, each reported once, on the rank whose rows are written."""


@cache
def _mark_as_logged() -> None:
    """Note for the node's collector that the values in this script's event files are not to become rows too."""
    if folder := os.environ.get(contract.FAULTS):
        with suppress(OSError):
            (Path(folder) / faults.LOGGED).touch()


@cache
def _heartbeat() -> Heartbeat:
    return Heartbeat(os.environ)


_forked_from_a_sink = False


@cache
def _default() -> Sink:
    sink = open_sink(os.environ, () if _forked_from_a_sink else None)
    atexit.register(_close, sink)
    if multiprocessing := sys.modules.get("multiprocessing.util"):  # its children leave without atexit
        multiprocessing.Finalize(None, _close, args=(sink,), exitpriority=0)
    main = threading.current_thread() is threading.main_thread()
    if isinstance(sink, MetricsWriter) and main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, partial(_write_rows_and_die, sink))
    return sink


def _after_fork() -> None:
    """Forget the parent's sink: a forked child has no writer thread, and opens a new sink when it logs."""
    global _forked_from_a_sink  # noqa: PLW0603 - of the process, as the sink is
    _forked_from_a_sink = _forked_from_a_sink or _default.cache_info().currsize > 0
    _default.cache_clear()
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, partial) and handler.func is _write_rows_and_die:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_after_fork)


def _close(sink: Sink, limit: float | None = None, *, failed: bool = False) -> None:
    try:
        sink.close(limit, failed=failed or hasattr(sys, "last_value"))  # set by an uncaught exception
    except OutputError as error:
        say(str(error))


def _write_rows_and_die(sink: MetricsWriter, signum: int, _frame: FrameType | None) -> None:
    """Write the remaining rows, then die of the signal. Replaces the default action, never a handler of the script."""
    with suppress(Exception):
        _close(sink, LAST_SECONDS, failed=True)
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
