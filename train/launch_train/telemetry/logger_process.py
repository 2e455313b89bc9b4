"""Feed the process that sends a run's rows to other services: `python -m launch_train.loggers wandb mlflow`.

It is a separate process because a logger's package takes seconds to import, holds the interpreter while it works, and
waits for its server when Python exits. Rows go through a pipe that nobody waits for.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import RLock
from typing import Final

from launch_train.common import contract
from launch_train.common.console import say
from launch_train.common.text import plural

MODULE: Final = "launch_train.loggers"

CLOSE_SECONDS: Final = 20.0
"""Time for the last rows at the end of a run. A process that must stop has less."""
EXIT_SECONDS: Final = 0.5
"""Additional time to exit."""
MOST_BYTES: Final = 8 << 20
"""Rows that may wait for the process, in bytes; beyond that, rows are dropped."""
POLL_SECONDS: Final = 0.02

NOT_INHERITED: Final = (contract.CODE, contract.CODE_PATH, contract.WATCH, contract.FAULTS, contract.EXIT_FILE)
"""Variables that are for the training processes only: the user's modules must not hide those of a logger."""


class LoggerProcess:
    """Passes rows on without waiting. A failure affects only the loggers: the run folder has all rows."""

    def __init__(self, names: Sequence[str], env: Mapping[str, str], argv: Sequence[str] = ()) -> None:
        """Start the process for `names`. `argv` replaces the command. Raises OSError."""
        self._names = ", ".join(names)
        inherited = {name: value for name, value in {**os.environ, **env}.items() if name not in NOT_INHERITED}
        # A separate session: signals to the training processes must not reach it.
        self._process = subprocess.Popen(
            [*(argv or (sys.executable, "-m", MODULE)), *names],
            stdin=subprocess.PIPE,
            env={**inherited, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._waiting = bytearray()
        self._dropped = 0
        self._failed = False
        self._deadline: float | None = None
        self._lock = RLock()  # at the end another thread may still write rows

    def write(self, data: bytes, rows: int) -> None:
        """Pass on `rows` rows, as lines of JSON."""
        with self._lock:
            if self._failed or len(self._waiting) + len(data) > MOST_BYTES:
                self._dropped += rows
            else:
                self._waiting += data
            self._push()

    def finish(self, seconds: float, *, failed: bool) -> None:
        """Let the process send its last rows within `seconds`, and exit. `failed`: the program has failed."""
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + seconds
                self._waiting += f"{json.dumps([seconds, failed])}\n".encode()
                self._push()

    def close(self) -> None:
        """Wait for the exit until the time of `finish` has passed, then kill the process. May be called again."""
        if self._pipe.closed:
            return
        deadline = (self._deadline or 0.0) + EXIT_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with self._lock:
                self._push()
            time.sleep(POLL_SECONDS)
        with self._lock, suppress(OSError):
            self._failed = True
            self._pipe.close()
        if self._process.poll() is None:
            with suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            say(f"warning: {self._names}: not finished in time; the last rows are in the run folder alone")
        if self._dropped:
            say(f"warning: {self._names}: {plural(self._dropped, 'row')} not logged; the run folder has them")

    def _push(self) -> None:
        try:
            while self._waiting and not self._failed:
                del self._waiting[: os.write(self._pipe.fileno(), self._waiting)]
        except BlockingIOError:  # the pipe is full
            pass
        except OSError:
            self._failed = True
            self._waiting.clear()
            if self._deadline is None:
                say(f"warning: {self._names}: the loggers' process has exited; training continues without it")
