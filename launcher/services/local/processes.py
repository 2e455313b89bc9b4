"""Run replicas as processes on this machine, pass on their output, and leave no process behind."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Final

from launch_train.common import contract
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.services.local import supervisor
from launcher.services.local.replicas import Replica
from launcher.services.local.supervisor import Ended, OnLine, Preemption, Say

DRAIN_SECONDS = 5
LEASH: Final = str(Path(contract.__file__).parents[1] / "node" / "parent_death.py")
"""Starts a program that is killed when this process ends, even by kill -9."""
PR_SET_CHILD_SUBREAPER: Final = 36


def run(
    replicas: Sequence[Replica],
    *,
    env: Mapping[str, str],
    workdir: Callable[[str], Path],
    on_line: OnLine,
    say: Say,
    disable_retries: bool = False,
    preemption: Preemption | None = None,
    clock: Clock = REAL,
) -> Ended:
    """Run all replicas as processes, by the rules of `supervisor.run`. `env`: the environment below each replica's own;
    `workdir`: returns the working directory for one more start of a replica.

    Raises LaunchError: a replica's program can't be started.
    """
    return supervisor.run(
        [partial(start, replica, env, workdir, on_line) for replica in replicas],
        resources=no_process_left(),
        say=say,
        disable_retries=disable_retries,
        preemption=preemption,
        clock=clock,
    )


class ProcessReplica:
    """One running replica: its process group, and the thread that reads its output."""

    def __init__(self, replica: Replica, process: subprocess.Popen[bytes], on_line: OnLine) -> None:
        self.name = replica.name
        self.process = process
        self._seat = f"{contract.CLUSTER_SPEC}={replica.env.get(contract.CLUSTER_SPEC)}".encode()
        self.reader = threading.Thread(target=self._read, args=(process.stdout, on_line), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes] | None, on_line: OnLine) -> None:
        with stream or nullcontext():
            for line in stream or ():
                on_line(self.name, line.decode(errors="replace").rstrip("\r\n"))

    def poll(self) -> int | None:
        """Return its exit code (negative: the signal that ended it); None while it runs."""
        return self.process.poll()

    def terminate(self) -> None:
        """Send SIGTERM to the first process."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole process group, if it still exists, and the processes of a killed replica that are in others:
        torchrun and the ranks have a session each."""
        with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_children(self._is_left)

    def _is_left(self, pid: int) -> bool:
        with suppress(OSError):  # it has ended meanwhile
            return self._seat in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def drain(self) -> None:
        """Wait until everything in the pipe was passed on."""
        self.reader.join(DRAIN_SECONDS)


def start(replica: Replica, env: Mapping[str, str], workdir: Callable[[str], Path], on_line: OnLine) -> ProcessReplica:
    """Start one replica in its own process group, so that the terminal's Ctrl-C only reaches launch.

    The kernel kills it when this process ends (train/launch_train/node/parent_death.py), so a killed launch leaves
    nothing running.
    """
    env, folder = {**env, **replica.env}, workdir(replica.name)
    leash = (sys.executable, "-I", "-S", LEASH, str(os.getpid()))
    try:
        process = subprocess.Popen(
            [*leash, program(replica.argv[0], env, folder), *replica.argv[1:]],
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(
            f"can't start {replica.name}: {replica.argv[0]}: {error.strerror}",
            "The command must be a program on this machine; to run it in its image: --docker",
        ) from error
    return ProcessReplica(replica, process, on_line)


def program(name: str, env: Mapping[str, str], folder: Path) -> str:
    """Return the path of a program, looked up from `folder` with `env`'s PATH. Raises FileNotFoundError."""
    path = shutil.which(str(folder / name) if "/" in name else name, path=env.get("PATH", os.defpath))
    if not path:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return path


# --- The processes that a killed replica leaves behind ----------------------------------------------------------------


@contextmanager
def no_process_left() -> Iterator[None]:
    """At the end, kill all processes that were started inside, including orphans.

    On Linux orphans become children of this process (PR_SET_CHILD_SUBREAPER), which can then find them.
    """
    before = set(children())
    set_subreaper(1)
    try:
        yield
    finally:
        kill_children(lambda pid: pid not in before)
        set_subreaper(0)


def set_subreaper(value: int) -> None:
    """Turn subreaping on or off. Linux only; elsewhere only the process groups are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)


def children() -> list[int]:
    """Return the ids of this process's children; empty without /proc."""
    pids: list[int] = []
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has ended meanwhile
                pids += map(int, (task / "children").read_text().split())
    return pids


def kill_children(is_left: Callable[[int], bool]) -> None:
    """Kill this process's children for which `is_left` is true, and the orphans that they leave, and wait for them."""
    while orphans := [pid for pid in children() if is_left(pid)]:
        for pid in orphans:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
