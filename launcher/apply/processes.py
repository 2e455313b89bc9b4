"""Replicas as processes of this machine: started together, their lines passed on, and none left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from launcher.apply.replicas import Replica
from launcher.errors import LaunchError

GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as on Vertex AI and on a Spot VM."""
PEERS_SECONDS = 20.0
"""What the other replicas get to notice by themselves that one has failed."""
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36

OnLine = Callable[[str, str], None]
"""Called with a replica's name and one line of its output, from a thread of that replica."""


class Started:
    """One running replica: its process group, and the thread that reads its output."""

    def __init__(self, replica: Replica, process: subprocess.Popen[bytes], on_line: OnLine) -> None:
        self.replica = replica
        self.process = process
        self.reader = threading.Thread(target=self._read, args=(process.stdout, on_line), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes] | None, on_line: OnLine) -> None:
        with stream or nullcontext():
            for line in stream or ():
                on_line(self.replica.name, line.decode(errors="replace").rstrip("\r\n"))

    def send(self, number: int) -> None:
        """Signal the whole process group; a group that is gone is fine."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run(replicas: Sequence[Replica], *, env: Mapping[str, str], folder: Path, on_line: OnLine) -> dict[str, int]:
    """Run all replicas to their end and return each one's exit code (negative: the signal that ended it).

    `env` comes below each replica's own environment. When one fails, the others get `PEERS_SECONDS` to notice and
    are then stopped. On KeyboardInterrupt all are stopped before it goes on.

    Raises:
        LaunchError: a replica's program can't be started.
    """
    started: list[Started] = []
    with no_process_left():
        try:
            for replica in replicas:
                started.append(start(replica, env, folder, on_line))
            wait(started)
        finally:
            stop(started)
            for one in started:  # what a group's last process wrote is still in the pipe
                one.reader.join(timeout=5)
    return {one.replica.name: one.process.returncode for one in started}


def start(replica: Replica, env: Mapping[str, str], folder: Path, on_line: OnLine) -> Started:
    """Start one replica in a process group of its own, so that the terminal's Ctrl-C reaches launch alone."""
    try:
        process = subprocess.Popen(
            replica.argv,
            env={**env, **replica.env},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"{replica.name} can't be started: {replica.argv[0]}: {error.strerror}",
            "The request's command must be a program on this machine; without --docker no image is used.",
        ) from error
    return Started(replica, process, on_line)


def wait(started: Sequence[Started]) -> None:
    """Until all have ended, or until one has failed and the others have had time to notice."""
    failed_at: float | None = None
    while any(one.process.poll() is None for one in started):
        if failed_at is None and any(one.process.returncode for one in started):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > PEERS_SECONDS:
            return
        time.sleep(POLL_SECONDS)


def stop(started: Sequence[Started]) -> None:
    """SIGTERM, up to `GRACE_SECONDS`, SIGKILL. A second Ctrl-C goes straight to SIGKILL."""
    alive = [one for one in started if one.process.poll() is None]
    for one in alive:
        one.send(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        deadline = time.monotonic() + GRACE_SECONDS
        for one in alive:
            one.process.wait(timeout=max(0.0, deadline - time.monotonic()))
    for one in started:
        one.send(signal.SIGKILL)
        one.process.wait()


@contextmanager
def no_process_left() -> Iterator[None]:
    """Everything that was started inside is gone at the end, also what a killed replica left behind.

    On Linux orphans are handed to this process (PR_SET_CHILD_SUBREAPER), which can then find and kill them.
    """
    before = set(children())
    set_subreaper(1)
    try:
        yield
    finally:
        while orphans := [pid for pid in children() if pid not in before]:
            for pid in orphans:
                kill_and_reap(pid)
        set_subreaper(0)


def set_subreaper(value: int) -> None:
    """Linux only; elsewhere the process groups must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def children() -> list[int]:
    """Process ids of this process's children; empty where /proc doesn't tell."""
    try:
        return [
            int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def kill_and_reap(pid: int) -> None:
    """End one child for good."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
