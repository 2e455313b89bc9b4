"""Replicas as processes of this machine: started together, their lines passed on, and none left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final

from launcher.apply.replicas import Replica
from launcher.errors import LaunchError
from train import contract

GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as on Vertex AI and on a Spot VM."""
PEERS_SECONDS = 20.0
"""What the other replicas get to notice by themselves that one has failed."""
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36
LEASH: Final = str(Path(contract.__file__).with_name("leash.py"))
"""Ends what it starts with this process, kill -9 included: see there."""

OnLine = Callable[[str, str], None]
"""Called with a replica's name and one line of its output, from a thread of that replica."""


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: all is stopped as after Ctrl-C. `signum` is which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


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
        Stopped: this process got SIGTERM or SIGHUP, and all have been stopped.
    """
    started: list[Started] = []
    try:
        with signals_stop(), no_process_left():
            try:
                for replica in replicas:
                    started.append(start(replica, env, folder, on_line))
                wait(started)
            finally:
                stop(started)
    finally:
        for one in started:  # what a group's last process wrote is still in the pipe; no orphan holds it open now
            one.reader.join(timeout=5)
    return {one.replica.name: one.process.returncode for one in started}


@contextmanager
def signals_stop() -> Iterator[None]:
    """SIGTERM and SIGHUP (the terminal has gone) raise Stopped inside, once: replicas have sessions of their own, so
    nothing else would reach them. Only the main thread can set handlers; what is ignored (nohup) stays so."""
    told: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        told.append(signum)
        if len(told) == 1:  # a closed terminal sends several: the stop is under way
            raise Stopped(signum)

    main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(replica: Replica, env: Mapping[str, str], folder: Path, on_line: OnLine) -> Started:
    """Start one replica in a process group of its own, so that the terminal's Ctrl-C reaches launch alone.

    On a leash (train/leash.py): the kernel ends it with this process, so a killed launch leaves nothing running.
    """
    env = {**env, **replica.env}
    try:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                LEASH,
                str(os.getpid()),
                program(replica.argv[0], env, folder),
                *replica.argv[1:],
            ],
            env=env,
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


def program(name: str, env: Mapping[str, str], folder: Path) -> str:
    """Where the program is, as seen from `folder` with `env`'s PATH. Raises FileNotFoundError."""
    found = shutil.which(str(folder / name) if "/" in name else name, path=env.get("PATH", os.defpath))
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return found


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
    found: list[int] = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that ended meanwhile has no children any more
                found += map(int, (task / "children").read_text().split())
    return found


def kill_and_reap(pid: int) -> None:
    """End one child for good."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
