"""The one seam through which the node starts, signals and ends processes."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGPIPE, SIGTERM
from typing import Final

_LEASH: Final = str(Path(__file__).with_name("parent_death.py"))
_PR_SET_CHILD_SUBREAPER: Final = 36
_POLL_S: Final = 0.02


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies (prctl(2)), as PID 1 is anyway.

    torchrun puts each worker into a session of its own: without this, the workers of a killed torchrun are lost.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Child:
    """A command in a session of its own, and all that descends from it."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start `argv`. Its output is ours; no signal reaches it but those that `signal` sends."""
        # posix_spawn, not fork: torch's store keeps threads. -I -S: nothing of the user's folder is imported.
        leash = [sys.executable, "-I", "-S", _LEASH, str(os.getpid()), *argv]
        default = (SIGTERM, SIGINT, SIGPIPE)
        self.pid = os.posix_spawn(sys.executable, leash, env, setsid=True, setsigdef=default, setsigmask=())
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs. Buries whatever else has died under us."""
        while self._code is None and (reaped := _reap()):
            pid, status = reaped
            if pid == self.pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def signal(self, signum: int) -> None:
        """Send a signal to the command's group. torchrun's workers are not in it: torchrun hands it on."""
        if self._code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def stop(self, grace: float, signum: int = SIGTERM, hurry: Callable[[], bool] = lambda: False) -> int:
        """Signal it, wait up to `grace` seconds or until `hurry`, and kill what is left of it; the exit code."""
        if self.poll() is None:
            self.signal(signum)
        deadline = time.monotonic() + grace
        while self.poll() is None and time.monotonic() < deadline and not hurry():
            time.sleep(_POLL_S)
        self.kill()
        code = self.poll()
        return -SIGKILL if code is None else code

    def kill(self) -> None:
        """SIGKILL for everything that descends from us, until nothing is left (at most 10 s)."""
        deadline = time.monotonic() + 10
        self.signal(SIGKILL)
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, SIGKILL)
            self.poll()
            while self._code is not None and _reap():
                pass
            time.sleep(_POLL_S)


def _reap() -> tuple[int, int] | None:
    """Process id and wait status of one dead child; None when there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def descendants(root: int) -> set[int]:
    """Processes below `root`, the dead that nobody has buried yet included; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # pid (name) state ppid …: the name may hold spaces and brackets. proc_pid_stat(5)
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo.extend(new)
    return found
