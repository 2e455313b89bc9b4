"""Jobs that run as processes: each is a `launch local` of the request, on this machine.

Nothing of launch is imported; it is started as a program, as a user would.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

LOCAL = (sys.executable, "-m", "launcher", "local")
LINE = re.compile(r"\[(?P<task>workerpool\d+-\d+)\] (?P<text>.*)", re.DOTALL)
POLL_SECONDS = 0.02
CLOSE_SECONDS = 20.0
"""Seconds in which a job must stop when its cloud closes, less than the 30 s that a replica may take to save."""


@dataclass(frozen=True)
class Runner:
    """How jobs run: with the user's code in the folder `code`, or with `docker` in containers of their images.

    `pending` is how many seconds a job is queued before it runs. `environ` is added to the environment.
    """

    code: Path | None = None
    docker: bool = False
    pending: float = 0.2
    environ: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = LOCAL
    """The program, without its flags --request, --as-job, -o, --code and --docker."""


class Ended(NamedTuple):
    """The end of a job's process: the failed replica and its status (0: none), or that it was stopped."""

    replica: str
    status: int
    stopped: bool


class Place(NamedTuple):
    """A run's view of its cloud: the clock, the environment that leads there, and its log (task, text)."""

    clock: Callable[[], float]
    environ: Callable[[], dict[str, str]]
    write: Callable[[str, str, str], object]


class Runs:
    """All running jobs. `close` ends them."""

    def __init__(self, runner: Runner, place: Place) -> None:
        self.runner = runner
        self.place = place
        self._running: dict[str, Run] = {}

    def start(self, job_id: str, request: dict[str, Any], done: Callable[[Ended], None]) -> None:
        """Run a job after `pending` seconds. `done` is called from its thread."""
        run = self._running[job_id] = Run(self.runner, self.place, job_id, request, done)
        run.start()

    def stop(self, job_id: str) -> None:
        """Send SIGTERM. `done` is called at the end. Does nothing if the job has ended."""
        self._running[job_id].stop()

    def pids(self) -> dict[str, int]:
        """Return the process id of each running job."""
        return {name: run.process.pid for name, run in self._running.items() if run.process and run.is_alive()}

    def close(self) -> None:
        """Stop all jobs, and kill those that don't stop in time."""
        for run in self._running.values():
            run.stop()
        for run in self._running.values():
            run.join(CLOSE_SECONDS)
            run.kill()
            run.join()


class Run(threading.Thread):
    """One job, from its queueing to its end."""

    def __init__(
        self, runner: Runner, place: Place, job_id: str, request: dict[str, Any], done: Callable[[Ended], None]
    ) -> None:
        super().__init__(name=f"job-{job_id}")
        self.runner = runner
        self.place = place
        self.job_id = job_id
        self.request = request
        self.done = done
        self.begins = place.clock() + runner.pending
        self.process: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Send SIGTERM to the program only, which must forward it."""
        with self._lock:
            self._stopped.set()
            if self.process:
                self.process.terminate()

    def kill(self) -> None:
        """Kill the process group of the process that was started here and has not been reaped."""
        with self._lock:
            if self.process and self.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def run(self) -> None:
        """Wait, run, and report the end."""
        while self.place.clock() < self.begins and not self._stopped.is_set():
            self._stopped.wait(POLL_SECONDS)
        with tempfile.TemporaryDirectory(prefix="job-") as folder:
            file = Path(folder) / "request.json"
            file.write_text(json.dumps(self.request), encoding="utf-8")
            with (Path(folder) / "result.json").open("w+", encoding="utf-8") as result:
                ended = self._ended(file, result)
        self.done(ended)

    def _ended(self, file: Path, result: IO[str]) -> Ended:
        with self._lock:
            if self._stopped.is_set():
                return Ended("", 0, stopped=True)
            self.process = subprocess.Popen(
                self.command(file),
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=subprocess.PIPE,
                env={**os.environ, **self.place.environ(), **self.runner.environ},
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        with self.process:
            for line in self.process.stderr or ():
                self._log(line.rstrip("\r\n"))
        result.seek(0)
        replica, status = failed(result.read(), self.process.returncode)
        return Ended(replica, status, self._stopped.is_set())

    def command(self, file: Path) -> list[str]:
        """Return the program with its flags."""
        job = ["--request", str(file), "--as-job", self.job_id, "-o", "json"]
        code = ["--code", str(self.runner.code.resolve())] if self.runner.code else []
        return [*self.runner.command, *job, *(["--docker"] if self.runner.docker else code)]

    def _log(self, line: str) -> None:
        match = LINE.fullmatch(line)
        self.place.write(self.job_id, match["task"] if match else "service", match["text"] if match else line)


def failed(result: str, status: int) -> tuple[str, int]:
    """Return the first failed replica and its status: 128 plus the number of the signal that ended it.

    Without a result, the program's own status is used for the first replica.
    """
    try:
        codes: dict[str, int] = json.loads(result)["exit_codes"]
    except (ValueError, KeyError):
        codes = {"workerpool0-0": status}
    replica, code = next(((name, code) for name, code in codes.items() if code), ("workerpool0-0", 0))
    code = code or status
    return replica, 128 - code if code < 0 else code
