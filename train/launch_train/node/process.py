"""Start, signal and end processes: the only module of the node that does."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM
from threading import Lock
from typing import Final

_PARENT_DEATH: Final = str(Path(__file__).with_name("parent_death.py"))
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits (prctl(2)), as PID 1 is anyway.

    torchrun puts each worker into its own session: without this, the workers of a killed torchrun would be lost.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """A command in its own session, with all of its descendants."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        registered: Callable[[], Collection[int]] = tuple,
        as_group: bool = False,
        started: int | None = None,
    ) -> None:
        """Start `argv`, unless it is the process `started` already (`Helper.release`). It writes to this process's
        output, and receives no signals but those of `stop`.

        `registered` returns the processes among its descendants that handle a signal themselves. If there are none, it
        goes to the command itself: to its first process alone, or with `as_group` to its process group.
        """
        self.pid = _spawn(argv, env) if started is None else started
        self._code: int | None = None
        self._registered, self._as_group = registered, as_group

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. Reaps all other dead children too."""
        while self._code is None and (reaped := _reap()):
            pid, status = reaped
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def stop(self, grace: float, signum: int = SIGTERM, hurry: Callable[[], bool] = lambda: False) -> int:
        """Signal the command, wait up to `grace` seconds or until `hurry`, and kill what is left. Returns the exit
        code.

        A process that saves needs its DataLoader workers for the rest of its step: they are in its process group, and
        die of SIGTERM. So a group gets the signal only once the registered processes have exited.
        """
        registered = self._registered()
        if self.poll() is None:
            for pid in registered or [-self.pid if self._as_group else self.pid]:
                _send(pid, signum)
        deadline = time.monotonic() + grace
        while self.poll() is None and time.monotonic() < deadline and not hurry():
            if registered and not (registered := self._registered()):
                _send(-self.pid, signum)
            time.sleep(_POLL_S)
        self.kill()
        code = self.poll()
        return -SIGKILL if code is None else code

    def kill(self) -> None:
        """Kill all descendants of this process until none is left (at most 10 s)."""
        deadline = time.monotonic() + 10
        if self._code is None:
            _send(-self.pid, SIGKILL)
        while (left := descendants(os.getpid()) - helpers) and time.monotonic() < deadline:
            for pid in left:
                _send(pid, SIGKILL)
            self.poll()
            while self._code is not None and _reap():
                pass
            time.sleep(_POLL_S)


class Helper:
    """A program of the node's own that reads bytes from stdin. The end of a generation does not kill it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start `argv`. Raises OSError."""
        reading, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        if sys.platform == "linux":
            with suppress(OSError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, HELPER_PIPE)
        try:
            self.pid = _spawn(argv, env, [(os.POSIX_SPAWN_DUP2, reading, 0)])
        except OSError:
            os.close(self._pipe)
            raise
        finally:
            os.close(reading)
        helpers.add(self.pid)
        self._rest = b""
        self._lock = Lock()

    def write(self, data: bytes) -> None:
        """Pass bytes on, without waiting: what comes while the pipe is full is lost. Thread-safe."""
        with self._lock, suppress(OSError):  # the pipe is full, or the program has exited
            self._rest = self._rest[os.write(self._pipe, self._rest) :] if self._rest else b""
            self._rest = self._rest or data[os.write(self._pipe, data) :]

    def release(self, data: bytes) -> int:
        """Write the last input and return the process id: from now on the end of a generation kills the program.

        Raises OSError if it has exited.
        """
        helpers.discard(self.pid)
        os.set_blocking(self._pipe, True)
        with os.fdopen(self._pipe, "wb") as pipe:
            pipe.write(data)
        if not self._runs():
            raise ChildProcessError(f"process {self.pid} has exited")
        return self.pid

    def close(self, seconds: float) -> None:
        """End the program's input, wait for its exit, and kill it after `seconds`."""
        deadline = time.monotonic() + seconds
        while self._rest and self._runs() and time.monotonic() < deadline:
            self.write(b"")
            time.sleep(_POLL_S)
        with self._lock:
            os.close(self._pipe)
            self._pipe = -1
        while self._runs() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._runs():
            os.kill(self.pid, SIGKILL)
        helpers.discard(self.pid)

    def _runs(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:  # reaped with the children
            return False


HELPER_PIPE: Final = 1 << 20
"""Bytes of output that may wait for a helper."""

helpers: set[int] = set()
"""Process ids of the helpers."""


def _spawn(argv: Sequence[str], env: Mapping[str, str], file_actions: Sequence[tuple[int, int, int]] = ()) -> int:
    """Start a command that ends with this process, in its own session; return its process id."""
    # posix_spawn, not fork: torch's store has threads. -I -S: import nothing from the user's folder.
    wrapped = [sys.executable, "-I", "-S", _PARENT_DEATH, str(os.getpid()), *argv]
    default = (SIGTERM, SIGINT, SIGPIPE)
    return os.posix_spawn(
        sys.executable, wrapped, env, file_actions=file_actions, setsid=True, setsigdef=default, setsigmask=()
    )


def _send(pid: int, signum: int) -> None:
    """Send a signal to a process, or to the process group -`pid`; to nothing if it has exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


def _reap() -> tuple[int, int] | None:
    """Return process id and wait status of one dead child; None if there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def descendants(root: int) -> set[int]:
    """Return all descendants of `root`, zombies included; empty without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # pid (name) state ppid …: the name may contain spaces and parentheses. proc_pid_stat(5)
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    pids: set[int] = set()
    todo = [root]
    while todo:
        new = children.get(todo.pop(), [])
        pids.update(new)
        todo.extend(new)
    return pids
