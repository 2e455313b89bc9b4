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
    feeds = [LoggerFeed(name, partial(_open_service, name, env), env) for name in names]
    is_preempted = is_training = False
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line, which a killed process has cut off
            continue
        if isinstance(record, list):
            seconds, failed = record
            break
        is_preempted = is_preempted or record.get("event") == "preempted"
        if record.get("event") in ("start", "end"):  # of the built-in trainer's run
            is_training = record["event"] == "start" and "config" in record
        for feed in feeds:
            feed.put(record)
            if is_preempted:  # no row follows, and every second counts
                feed.end("preempted")
    else:
        seconds, failed = ORPHAN_SECONDS, True
    until = time.monotonic() + max(0.0, seconds - RESERVE_SECONDS)
    state: State = "preempted" if is_preempted else "failed" if failed or is_training else "finished"
    for feed in feeds:
        feed.end(state)
    for feed in feeds:
        feed.join(until)


def _open_service(name: str, env: Mapping[str, str]) -> Service:
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
