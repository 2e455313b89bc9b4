"""Collect the metrics that a script prints or writes itself: `python -m launch_train.node.collector`, run by the node.

It reads the processes' output from stdin, and writes the rows that `run.metrics.regex` finds in it to the run folder
(on node 0). It uploads the event files below `run.metrics.tensorboard`. It is a separate process because Python's
regular expressions can take exponential time, and hold the interpreter meanwhile: the node must continue.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Final

from launch_train.common import contract, faults
from launch_train.common.errors import OutputError
from launch_train.common.storage import open_storage
from launch_train.telemetry.event_files import EventFiles
from launch_train.telemetry.line_metrics import LineMetrics
from launch_train.telemetry.metric_sink import Sink, open_sink
from launch_train.telemetry.throttled_warning import say
from launch_train.telemetry.upload_queue import open_outbox

MATCH_SECONDS: Final = 1.0
"""Time limit of the regular expression for one line; beyond it no more rows are read."""

POLL_SECONDS: Final = 2.0
"""Interval at which the event files are checked."""

LAST_SECONDS: Final = 1.5
"""Time for the last uploads; the node uploads what is left on the disk."""


class _TooSlowError(Exception):
    """The regular expression took longer than MATCH_SECONDS."""


def main(env: Mapping[str, str] = os.environ) -> None:
    """Collect until stdin ends."""
    settings = json.loads(env[contract.SCRIPT_METRICS])
    regex = settings.get("regex") if env.get(contract.NODE) == "0" else None
    reader = RowReader(regex, open_sink(env)) if regex else None
    files = None
    if folder := settings.get("tensorboard"):
        files = EventFiles(Path(folder).absolute(), open_outbox(open_storage(env[contract.RUN_FOLDER]), env))
    due = 0.0
    while (data := _read()) is not None:
        if reader:
            reader.read(data)
        if files and time.monotonic() >= due:
            files.upload()
            due = time.monotonic() + POLL_SECONDS
    if files:
        files.upload(last=True)
    if reader:
        reader.sink.close(LAST_SECONDS)
    if files:
        files.outbox.close(LAST_SECONDS)


def _read() -> bytes | None:
    """Return the bytes that arrived within POLL_SECONDS; None at the end of stdin."""
    ready, _, _ = select.select([0], [], [], POLL_SECONDS)
    return (os.read(0, 1 << 16) or None) if ready else b""


class RowReader:
    """Writes the rows of lines to a sink, within a time limit for each line."""

    def __init__(self, regex: str, sink: Sink) -> None:
        self.sink = sink
        self._lines = LineMetrics(regex)
        self._stopped = False
        signal.signal(signal.SIGALRM, _interrupt)

    def read(self, data: bytes) -> None:
        """Read lines and write their rows. Raises OutputError."""
        for line in self._lines.lines(data):
            if self._stopped:
                return
            signal.setitimer(signal.ITIMER_REAL, MATCH_SECONDS)  # sre checks for signals while it searches
            try:
                rows = list(self._lines.rows(line))
            except _TooSlowError:
                self._stopped = True
                say(
                    f"warning: run.metrics.regex took more than {MATCH_SECONDS:g} s on a line of {len(line)} "
                    "characters: no more rows are read from the output"
                )
                return
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            for row in rows:
                self.sink.put([row])
                faults.record_step(row["step"])


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise _TooSlowError


if __name__ == "__main__":
    try:
        main()
    except OutputError as error:
        say(f"warning: run.metrics: {error}")
        sys.exit(1)
