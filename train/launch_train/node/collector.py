"""Collect the metrics that a script prints or writes itself: `python -m launch_train.node.collector STARTED`.

The node runs it. STARTED: when the node started the script, in Unix seconds.

It reads the processes' output from stdin, and writes the rows that `run.metrics.regex` finds in it to the run folder
(on node 0). It uploads the event files below `run.metrics.tensorboard`; their scalars become rows too, and those of the
event files that the script writes to a local run folder. It is a separate process because Python's regular expressions
can take exponential time, and hold the interpreter meanwhile: the node must continue.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

from launch_train import runfolder
from launch_train.common import contract, faults
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.common.heartbeat import Heartbeat
from launch_train.common.storage import LocalFolder, open_storage
from launch_train.node.hang_detection import rank_of
from launch_train.telemetry.event_files import EventFiles, EventScalars, Scalar, event_paths
from launch_train.telemetry.metric_sink import Sink, open_sink, wanted_loggers
from launch_train.telemetry.rows import Row
from launch_train.telemetry.tensorboard import OWN_FILE
from launch_train.telemetry.upload_queue import open_outbox

MATCH_SECONDS: Final = 1.0
"""Time limit of the regular expression for one line; beyond it no more rows are read."""

POLL_SECONDS: Final = 2.0
"""Interval at which the event files are checked."""

HOLD_SECONDS: Final = 30.0
"""The first scalars of event files wait this long, or until the script ends, for its first `metrics.log`."""

KEPT_STEPS: Final = 10_000
"""Steps whose rows may still get values: a script that writes its evaluations rarely also flushes their file rarely."""

LAST_SECONDS: Final = 1.5
"""Time for the last uploads; the node uploads what is left on the disk."""


LINE: Final = 2000
"""Longest line, in characters, that is searched: longer lines are not metrics."""

_ENDS: Final = re.compile(r"[\r\n]+")
"""A progress bar ends its lines with a carriage return."""


class _TooSlowError(Exception):
    """The regular expression took longer than MATCH_SECONDS."""


def main(started: float, env: Mapping[str, str] = os.environ) -> None:
    """Collect until stdin ends."""
    settings = json.loads(env.get(contract.SCRIPT_METRICS) or "{}")
    storage = open_storage(env[contract.RUN_FOLDER])
    logs = storage.folder / runfolder.LOGS if isinstance(storage, LocalFolder) else None
    folder = Path(settings["tensorboard"]).absolute() if "tensorboard" in settings else None
    run = Path(env[contract.RUN_PATH]) if contract.RUN_PATH in env else None
    files = None
    # In a run folder on this machine TensorBoard finds them anywhere; in a bucket it is shown logs/ alone.
    if folder and not (logs and run and folder.is_relative_to(run)):
        files = EventFiles(folder, open_outbox(storage, env), run and run / runfolder.LOGS)
    rows = reader = events = None
    if env.get(contract.NODE) == "0":
        loggers = wanted_loggers(env)
        if "regex" not in settings:  # the script's event files are in the run folder: no copy of their curves
            loggers = [name for name in loggers if name not in ("tensorboard", "vertex")]
        rows = StepRows(lambda: open_sink(env, loggers))
        reader = RowReader(settings["regex"], rows) if "regex" in settings else None
        folders = [path for path in (folder, logs) if path]
        if folder and logs and (folder.is_relative_to(logs) or logs.is_relative_to(folder)):
            folders = [min(folder, logs)]  # the one that contains the other
        events = EventRows([EventScalars(path, started) for path in folders], logs, rows, env)
    due, last = 0.0, False
    while not last:
        ready, _, _ = select.select([0], [], [], 0.0 if events and events.is_behind else POLL_SECONDS)
        data = os.read(0, 1 << 16) if ready else b""
        last = bool(ready) and not data
        if reader:
            reader.read(data)
        if last or time.monotonic() >= due or (events and events.is_behind):
            if files:
                files.upload(last=last)
            if events:
                events.read(last=last)
            due = time.monotonic() + POLL_SECONDS
    if rows and rows.sink:
        rows.sink.close(LAST_SECONDS)
    if files:
        files.outbox.close(LAST_SECONDS)


class StepRows:
    """Writes rows, each with all values of its step so far, as readers take a step's last row. The last row that is
    written is always the newest step's, which shows the progress. The sink is opened with the first row."""

    def __init__(self, open_rows: Callable[[], Sink]) -> None:
        self._open = open_rows
        self.sink: Sink | None = None
        self._rows: dict[int, Row] = {}
        self._changed: set[int] = set()
        self._dropped = -1
        """The newest step whose row gets no more values."""
        self._was_late = False

    def add(self, step: int, when: float, values: Mapping[str, float]) -> None:
        row = self._rows.pop(step, None)
        if row is None and step <= self._dropped:
            if not self._was_late:
                say(f"warning: {', '.join(values)} of step {step} came too late for the metrics; later ones may, too")
            self._was_late = True
            return
        self._rows[step] = {"step": step, "time": when} if row is None else row
        self._rows[step].update(values)
        self._changed.add(step)

    def write(self) -> None:
        """Write the rows that have changed. Raises OutputError."""
        if not self._changed:
            return
        self.sink = self.sink or self._open()
        newest = max(self._rows)
        self.sink.put([dict(self._rows[step]) for step in (*sorted(self._changed - {newest}), newest)])
        faults.record_step(newest)
        self._changed.clear()
        for step in [*self._rows][:-KEPT_STEPS]:
            del self._rows[step]
            self._dropped = max(self._dropped, step)


class EventRows:
    """Adds the scalars of event files to rows, unless the script logs rows itself: those have the same values."""

    def __init__(
        self, sources: Sequence[EventScalars], logs: Path | None, rows: StepRows, env: Mapping[str, str]
    ) -> None:
        """`logs`: logs/ of a local run folder."""
        self._sources, self._logs, self._rows = sources, logs, rows
        self._logged = Path(env[contract.FAULTS]) / faults.LOGGED
        self._silence = float(env.get(contract.HANG_AFTER) or math.inf)
        self._heartbeat = Heartbeat(env)
        self._held: list[Scalar] = []
        self._due: float | None = None
        """time.monotonic() until which scalars are held; None before the first one."""
        self._is_read: dict[Path, bool] = {}

    @property
    def is_behind(self) -> bool:
        """Return whether the files have more scalars than were read."""
        return any(source.is_behind for source in self._sources)

    def read(self, *, last: bool) -> None:
        """Read the new scalars, all if this is the `last` call, and write their rows. Raises OutputError."""
        if self._logged.exists():
            self._sources = ()
            return
        count = len(self._held)
        for source in self._sources:
            paths = sorted(event_paths(source.folder), key=lambda path: (path.name, path))
            paths = [path for path in paths if self._is_read.setdefault(path, is_read_from(path, self._logs))]
            self._held += source.read(paths)
            while last and source.is_behind:
                self._held += source.read(paths)
        if self._silence < math.inf and len(self._held) > count:
            self._heartbeat.extend(self._silence)
        if self._held and self._due is None:
            self._due = time.monotonic() + HOLD_SECONDS
        if last or (self._due and time.monotonic() >= self._due):
            if last and not (self._held or self._rows.sink):
                self._held = [scalar for source in self._sources for scalar in source.initial.values()]
            for scalar in self._held:
                self._rows.add(scalar.step, scalar.time, {scalar.name: scalar.value})
            self._held.clear()
            self._rows.write()


def is_read_from(path: Path, logs: Path | None) -> bool:
    """Return whether an event file is a script's own, of rank 0 as far as that is known: torch's writer puts host and
    process id into the name. The run folder's `logs` also have launch's own files, and copies in logs/script."""
    if logs and (OWN_FILE.fullmatch(path.name) or path.is_relative_to(logs / "script")):
        return False
    writer = re.search(r"tfevents\.\d+\.(.+)\.(\d+)\.\d+", path.name)
    return not (writer and writer[1] == socket.gethostname() and rank_of(writer[2]))


class RowReader:
    """Writes the rows of lines of output, within a time limit for each line. `regex` has the group `step`; its other
    named groups are values.

    Only the first value of a name counts, and lines of an earlier step are ignored: several ranks may print the same.
    """

    def __init__(self, regex: str, rows: StepRows) -> None:
        self._pattern, self._rows = re.compile(regex), rows
        self._incomplete = ""
        self._step, self._known = -math.inf, set[str]()
        """The newest step, and the names of its values so far."""
        self._stopped = False

        def interrupt(_signum: int, _frame: FrameType | None) -> None:
            raise _TooSlowError

        signal.signal(signal.SIGALRM, interrupt)

    def read(self, data: bytes) -> None:
        """Read output and write the rows of its complete lines. Raises OutputError."""
        *lines, incomplete = _ENDS.split(self._incomplete + data.decode(errors="replace"))
        self._incomplete = incomplete[: LINE + 1]
        for line in lines:
            if self._stopped or len(line) > LINE:
                continue
            signal.setitimer(signal.ITIMER_REAL, MATCH_SECONDS)  # sre checks for signals while it searches
            try:
                match = self._pattern.search(line)
            except _TooSlowError:
                self._stopped = True
                say(
                    f"warning: run.metrics.regex took more than {MATCH_SECONDS:g} s on a line of {len(line)} "
                    "characters: no more rows are read from the output"
                )
                continue
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if match:
                self._write(match.groupdict())

    def _write(self, groups: Mapping[str, str | None]) -> None:
        """Write the row of a line, if it is the first of its step or has values that the step's earlier lines lack."""
        values: dict[str, float] = {}
        for name, text in groups.items():
            with suppress(ValueError, TypeError):  # no number, or a group that took no part
                values[name] = float(text)  # type: ignore[arg-type]  # float(None) raises TypeError
        step = values.pop("step", math.nan)
        if not math.isfinite(step) or step < self._step:
            return
        known = self._known if step == self._step else set[str]()
        if new := {name: value for name, value in values.items() if name not in known}:
            self._step, self._known = step, known | new.keys()
            self._rows.add(int(step), time.time(), new)
            self._rows.write()


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]))
    except OutputError as error:
        say(f"warning: run.metrics: {error}")
        sys.exit(1)
