"""Replicas as processes of this machine: their lines passed on, and none left behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Final

from launch_train.common import contract
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.rehearsal import supervisor
from launcher.rehearsal.replicas import Replica
from launcher.rehearsal.subreaper import no_process_left
from launcher.rehearsal.supervisor import Ended, OnLine, Preemption

DRAIN_SECONDS = 5
LEASH: Final = str(Path(contract.__file__).parents[1] / "node" / "parent_death.py")
"""Ends what it starts with this process, kill -9 included: see there."""


def run(
    replicas: Sequence[Replica],
    *,
    env: Mapping[str, str],
    folders: Mapping[str, Path],
    on_line: OnLine,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas as processes, by the rules of `running.run`. `env` comes below each one's own environment;
    `folders` has each one's working directory, by its name.

    Raises:
        LaunchError: a replica's program can't be started.
        Stopped: this process got SIGTERM or SIGHUP, and all have been stopped.
    """
    started = (start(replica, env, folders[replica.name], on_line) for replica in replicas)
    return supervisor.run(started, cleared=no_process_left(), preemption=preemption, clock=clock)


class Started:
    """One running replica: its process group, and the thread that reads its output."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], on_line: OnLine) -> None:
        self.name = name
        self.process = process
        self.reader = threading.Thread(target=self._read, args=(process.stdout, on_line), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes] | None, on_line: OnLine) -> None:
        with stream or nullcontext():
            for line in stream or ():
                on_line(self.name, line.decode(errors="replace").rstrip("\r\n"))

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); None while it runs."""
        return self.process.poll()

    def terminate(self) -> None:
        """SIGTERM to the first process."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the whole process group; one that is gone is fine."""
        with suppress(ProcessLookupError, PermissionError):  # the latter is macOS' word for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def drain(self) -> None:
        """Until all that is in the pipe has been passed on."""
        self.reader.join(DRAIN_SECONDS)


def start(replica: Replica, env: Mapping[str, str], folder: Path, on_line: OnLine) -> Started:
    """Start one replica in a process group of its own, so that the terminal's Ctrl-C reaches launch alone.

    On a leash (train/launch_train/node/parent_death.py): the kernel ends it with this process, so a killed launch
    leaves nothing running.
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
    return Started(replica.name, process, on_line)


def program(name: str, env: Mapping[str, str], folder: Path) -> str:
    """Where the program is, as seen from `folder` with `env`'s PATH. Raises FileNotFoundError."""
    found = shutil.which(str(folder / name) if "/" in name else name, path=env.get("PATH", os.defpath))
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return found
