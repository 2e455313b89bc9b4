"""Replicas as processes of this machine: started together, their lines passed on, and none left behind."""

from __future__ import annotations

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
from typing import IO, Final, NamedTuple

from launcher.apply.orphans import no_process_left
from launcher.apply.replicas import Replica
from launcher.errors import LaunchError
from train import contract

GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL, as on Vertex AI and on a Spot VM."""
PEERS_SECONDS = 20.0
"""What the other replicas get to notice by themselves that one has failed."""
POLL_SECONDS = 0.1
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

    def kill(self) -> None:
        """End the whole process group; one that is gone is fine."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Clock(NamedTuple):
    """The time that replicas are waited for."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL: Final = Clock()


class Preemption(NamedTuple):
    """The platform takes the machines away: `after` seconds from the replicas' start. `begins` is called then."""

    after: float
    begins: Callable[[], None]


class Ended(NamedTuple):
    """How the replicas ended: an exit code each (negative: the signal that ended it).

    `preempted` is how many seconds a preemption took until all were gone; None: there was none.
    """

    codes: dict[str, int]
    preempted: float | None = None


def run(
    replicas: Sequence[Replica],
    *,
    env: Mapping[str, str],
    folder: Path,
    on_line: OnLine,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas to their end, or to their preemption.

    `env` comes below each replica's own environment. When one fails, the others get `PEERS_SECONDS` to notice and
    are then stopped. On KeyboardInterrupt all are stopped before it goes on.

    Raises:
        LaunchError: a replica's program can't be started.
        Stopped: this process got SIGTERM or SIGHUP, and all have been stopped.
    """
    started: list[Started] = []
    seconds = None
    try:
        with signals_stop(), no_process_left():
            try:
                for replica in replicas:
                    started.append(start(replica, env, folder, on_line))
                if wait(started, clock, preemption.after if preemption else float("inf")) and preemption:
                    seconds = preempt(started, clock, preemption)
            finally:
                stop(started, clock)
    finally:
        for one in started:  # what a group's last process wrote is still in the pipe; no orphan holds it open now
            one.reader.join(timeout=5)
    return Ended({one.replica.name: one.process.returncode for one in started}, seconds)


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


def wait(started: Sequence[Started], clock: Clock, seconds: float) -> bool:
    """Until all have ended, or until one has failed and the others have had time to notice.

    Whether `seconds` were over before any of that.
    """
    begun, failed_at = clock.now(), float("inf")
    while any(one.process.poll() is None for one in started):
        now = clock.now()
        if any(one.process.returncode for one in started):
            failed_at = min(failed_at, now)
        elif now - begun >= seconds:
            return True
        if now - failed_at > PEERS_SECONDS:
            return False
        clock.sleep(POLL_SECONDS)
    return False


def preempt(started: Sequence[Started], clock: Clock, preemption: Preemption) -> float:
    """SIGTERM, 30 seconds, SIGKILL; how long it took until all were gone. Ctrl-C ends it early, and goes on."""
    preemption.begins()
    begun = clock.now()
    ask(started, clock)
    for one in started:
        one.kill()
    return clock.now() - begun


def stop(started: Sequence[Started], clock: Clock) -> None:
    """SIGTERM, up to `GRACE_SECONDS`, SIGKILL. A second Ctrl-C goes straight to SIGKILL."""
    with suppress(KeyboardInterrupt):
        ask(started, clock)
    for one in started:
        one.kill()


def ask(started: Sequence[Started], clock: Clock) -> None:
    """SIGTERM to those that still run, and up to `GRACE_SECONDS` for them to end.

    To the first process of each alone, as a platform signals a container's PID 1: handing it on is that one's work.
    """
    for one in started:
        one.process.send_signal(signal.SIGTERM)
    deadline = clock.now() + GRACE_SECONDS
    while any(one.process.poll() is None for one in started) and clock.now() < deadline:
        clock.sleep(POLL_SECONDS)
