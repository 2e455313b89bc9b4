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

MOST_EVENTS: Final = 1000
"""Events that wait to be handled; then the replicas' output waits."""

OnEvent = Callable[[Event], object]
OnStart = Callable[["SupervisorHandle"], object]


class SupervisorHandle:
    """A handle on the process that supervises one job (launcher.services.local.__main__)."""

    def __init__(self, job: LocalJob, environ: Mapping[str, str], *, own_session: bool = True) -> None:
        """`own_session`: Ctrl-C in the terminal does not reach the process, so it must be stopped."""
        self._connection, other = Pipe()
        self._events: queue.Queue[Event | None] = queue.Queue(MOST_EVENTS)
        self._closing = threading.Event()
        try:
            with other:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "launcher.services.local", str(other.fileno())],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    start_new_session=own_session,
                )
            with suppress(OSError):  # it could not start, and has no events
                self._connection.send(job)
        except BaseException:
            self._connection.close()  # which ends it
            raise
        # A thread reads, because an interrupt in the middle of a message would lose the rest of the stream.
        self._reader = threading.Thread(target=self._read, name="supervisor", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._put(self._connection.recv())
        finally:
            self._put(None)

    def _put(self, event: Event | None) -> None:
        """Wait for room in the queue; once nobody takes events any more, drop it."""
        while not self._closing.is_set():
            with suppress(queue.Full):
                self._events.put(event, timeout=0.2)
                return

    def event(self) -> Event | None:
        """Return the next event; None: the supervisor has ended."""
        while True:
            try:
                return self._events.get(timeout=1.0)
            except queue.Empty:
                if not self._reader.is_alive() and self._events.empty():
                    return None  # an interrupt took the last event

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
        """Stop the job if it still runs, and wait for the supervisor's end. Its events are read on, as it could not end
        with full pipes."""
        self._closing.set()
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
    on_start: OnStart | None = None,
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
        # In a thread Ctrl-C comes to nobody but the supervisor, unless `on_start` gives it to somebody who stops it.
        own_session = on_start is not None or threading.current_thread() is threading.main_thread()
        supervisor = SupervisorHandle(job, environ, own_session=own_session)
        try:
            if on_start:
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
        code = supervisor.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
        raise LaunchError(
            f"the job's supervisor {how}", "The job's processes ended with it. The same command continues the run."
        )
    return outcome
