"""Run a job in a supervisor of its own (launcher.services.local.__main__), and pass on what it reports."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from typing import Final

from launcher.errors import LaunchError
from launcher.services.local.job import KILL, STOP, Event, LocalJob, Outcome
from launcher.signals import signals_stop

STOP_SECONDS: Final = 45.0
"""Time to stop the replicas after an interrupt: 30 s until SIGKILL (launcher.services.local.supervisor), and some to
record the end."""

OnEvent = Callable[[Event], object]
OnStart = Callable[["Supervisor"], object]


class Supervisor:
    """The supervisor of one job: a process in a session of its own, so that no Ctrl-C in the terminal reaches it."""

    def __init__(self, job: LocalJob, environ: Mapping[str, str]) -> None:
        self._connection, other = Pipe()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.services.local", str(other.fileno())],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self._connection.send(job)
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        # A thread reads, because an interrupt in the middle of a message would lose the rest of the stream.
        threading.Thread(target=self._read, name="supervisor", daemon=True).start()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._events.put(self._connection.recv())
        self._events.put(None)

    def event(self) -> Event | None:
        """Return the next event; None: the supervisor has ended."""
        return self._events.get()

    def stop(self) -> None:
        """Stop the replicas; they get 30 s to save."""
        self._send(STOP)

    def kill(self) -> None:
        """Kill the replicas that are being stopped."""
        self._send(KILL)

    def _send(self, word: str) -> None:
        with suppress(OSError):  # it has ended
            self._connection.send(word)

    def close(self) -> None:
        """Stop the job if it still runs, and wait for the supervisor's end."""
        self.stop()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._connection.close()


def run_job(
    job: LocalJob,
    on_event: OnEvent,
    *,
    environ: Mapping[str, str] = os.environ,
    on_start: OnStart = lambda _supervisor: None,
) -> Outcome:
    """Run a job to its end and return how it ended. `on_event` gets its events on the calling thread; `on_start` gets
    its supervisor.

    On Ctrl-C, SIGTERM or SIGHUP the job is stopped, and KeyboardInterrupt is raised once it has ended; a second Ctrl-C
    kills it.

    Raises:
        UsageError: the request cannot run here, or its run folder is unusable or in use.
        LaunchError: a replica, an image or the code is not available.
    """
    interrupt: KeyboardInterrupt | None = None
    outcome: Outcome | None = None
    with signals_stop():
        supervisor = Supervisor(job, environ)
        try:
            on_start(supervisor)
            while True:
                try:
                    event = supervisor.event()
                    if event is None:
                        break
                    if isinstance(event, LaunchError):
                        raise event
                    outcome = event if isinstance(event, Outcome) else outcome
                    on_event(event)
                except KeyboardInterrupt as received:
                    (supervisor.kill if interrupt else supervisor.stop)()
                    interrupt = interrupt or received
        finally:
            supervisor.close()
    if interrupt:
        raise interrupt
    if outcome is None:
        raise LaunchError(
            f"the process that supervises the job ended with exit code {supervisor.process.returncode}",
            "The job's processes ended with it. The same command continues the run.",
        )
    return outcome
