"""Jobs that run on this machine: the supervisor of `launch local` runs each request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.errors import LaunchError

if TYPE_CHECKING:
    from launcher.services.local.client import SupervisorHandle

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


class Ended(NamedTuple):
    """The end of a job: the failed replica and its status (0: none), or that it was stopped."""

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
        """Return the process id of each running job's supervisor."""
        running = {name: run.supervisor for name, run in self._running.items() if run.is_alive()}
        return {name: supervisor.process.pid for name, supervisor in running.items() if supervisor}

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
        self.supervisor: SupervisorHandle | None = None
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def stop(self) -> None:
        """Stop the job. Its replicas get 30 s to save."""
        with self._lock:
            self._stopped.set()
            if self.supervisor:
                self.supervisor.stop()

    def kill(self) -> None:
        """Kill the replicas that are being stopped."""
        with self._lock:
            if self.supervisor:
                self.supervisor.kill()

    def run(self) -> None:
        """Wait, run, and report the end."""
        while self.place.clock() < self.begins and not self._stopped.is_set():
            self._stopped.wait(POLL_SECONDS)
        self.done(self._ended())

    def _ended(self) -> Ended:
        from launcher.inputs.code_files import collect_code, without_secrets
        from launcher.services.local.client import SupervisorHandle
        from launcher.services.local.job import LocalJob, Message, Outcome, Printed
        from launcher.services.local.workdirs import Code

        sent = without_secrets(collect_code(self.runner.code) if self.runner.code else [])
        job = LocalJob(
            request=self.request,
            code=Code(sent.files),
            docker=self.runner.docker,
            substitutes=("image not used: runs in the local Python environment",),
            job_id=self.job_id,
        )
        with self._lock:
            if self._stopped.is_set():
                return Ended("", 0, stopped=True)
            environ = {**os.environ, **self.place.environ(), **self.runner.environ}
            supervisor = self.supervisor = SupervisorHandle(job, environ)
        codes: Mapping[str, int] = {"workerpool0-0": 1}
        while (event := supervisor.event()) is not None:
            if isinstance(event, Printed):
                self.place.write(self.job_id, event.replica, event.text)
            elif isinstance(event, Message):
                self.place.write(self.job_id, "service", f"launch: {event.text}")
            elif isinstance(event, LaunchError):
                self.place.write(self.job_id, "service", f"error: {event}")
            elif isinstance(event, Outcome):
                codes = event.end.exit_codes or codes
        supervisor.close()
        replica, code = next(((name, code) for name, code in codes.items() if code), ("", 0))
        return Ended(replica, 128 - code if code < 0 else code, self._stopped.is_set())
