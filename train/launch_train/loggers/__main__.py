"""Send the rows on stdin to loggers: `python -m launch_train.loggers wandb mlflow`.

Each line is a row as in the run folder (JSON); the last one is a list: the seconds left, and whether the program has
failed. If it is missing, the training process was killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from launch_train.loggers.feed import LoggerFeed, Service, State, run_info
from launch_train.telemetry.rows import Row

ORPHAN_SECONDS: Final = 5.0
"""Time for the last rows after the training process was killed."""
RESERVE_SECONDS: Final = 0.1
"""Part of that time that is reserved for printing the last lines."""
NICENESS: Final = 10
"""Training has priority if processors are scarce."""

PRIVACY: Final = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""Disable both packages' own usage reports unless the spec enables them."""


def main(names: Sequence[str], lines: Iterable[bytes]) -> None:
    """Send all rows of `lines`, and report those that could not be sent."""
    for name, value in PRIVACY.items():
        os.environ.setdefault(name, value)
    env = dict(os.environ)
    feeds = [LoggerFeed(name, partial(_open, name, env), env) for name in names]
    progress = Progress()
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line, which a killed process has cut off
            continue
        if isinstance(record, list):
            seconds, failed = record
            break
        progress.note(record)
        for feed in feeds:
            feed.put(record)
            if progress.preempted:  # no row follows, and every second counts
                feed.end("preempted")
    else:
        seconds, failed = ORPHAN_SECONDS, True
    until = time.monotonic() + max(0.0, seconds - RESERVE_SECONDS)
    for feed in feeds:
        feed.end(progress.state(failed=failed))
    for feed in feeds:
        feed.join(until)


class Progress:
    """The state of the run according to its events."""

    def __init__(self) -> None:
        self.preempted = False
        self._is_training = False

    def note(self, row: Row) -> None:
        """Note an event. The built-in trainer's run begins with `start` and is complete with `end`."""
        event = row.get("event")
        self.preempted = self.preempted or event == "preempted"
        if event in ("start", "end"):
            self._is_training = event == "start" and "config" in row

    def state(self, *, failed: bool) -> State:
        if self.preempted:
            return "preempted"
        return "failed" if failed or self._is_training else "finished"


def _open(name: str, env: Mapping[str, str]) -> Service:
    """Open a service; its package is imported here, in its own thread. Raises ImportError."""
    if name == "wandb":
        from launch_train.loggers.wandb_run import WandbRun

        return WandbRun(run_info(env))
    from launch_train.loggers.mlflow_run import MlflowRun

    return MlflowRun(run_info(env))


if __name__ == "__main__":
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # the training process says when it is over
    os.nice(NICENESS)
    main(sys.argv[1:], sys.stdin.buffer)
    sys.stdout.flush()
    # A package's own exit handlers may wait for its server.
    os._exit(0)
