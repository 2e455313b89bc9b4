"""How a training process ends: at once, and with a word to the node about why."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import NoReturn

from launch_train.common import contract, faults
from launch_train.common.contract import Exit
from launch_train.common.errors import TrainError

_DELIBERATE = frozenset(Exit) - {Exit.FAILED}


NOTICE_SECONDS = 14.0
"""From the notice of a preemption to a durable checkpoint: less than torchrun gives its processes (Timing)."""

PEER_SECONDS = 3.0
"""Time that a rank has to exit by itself once a peer has failed, before its watching thread ends it."""


class Told:
    """Whether this process was told to stop, since when, and what that means."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.signum = 0
        self.at = 0.0
        """time.monotonic() of the first signal."""
        self.saving = False
        """At work for the last time: saving, or at the end of the run."""
        self.inside = True
        """False once the loop is over."""
        self._notice = env.get(contract.NOTICE)

    @property
    def preempted(self) -> bool:
        """The whole machine must stop, so all ranks can save. Without a node above (no name for its notice) every
        signal means that. The node takes its notice back when another node reports that its processes have failed."""
        return bool(self.signum) and (not self._notice or Path(self._notice).exists())

    def obey(self) -> None:
        """Raise SystemExit if we were told to stop because a peer has failed: nothing can be agreed any more."""
        if self.signum and not self.preempted:
            raise SystemExit(128 + self.signum)

    def note(self, signum: int, _frame: FrameType | None) -> None:
        """The signal's handler. A second one changes nothing."""
        if not self.signum:
            self.signum, self.at = signum, self.at or time.monotonic()


@contextmanager
def heeding_sigterm(env: Mapping[str, str], stuck: Callable[[Told], None]) -> Iterator[Told]:
    """Inside, SIGTERM is only noted. Only the main thread can have it so; elsewhere nothing is changed.

    `stuck` is called, from a thread, as soon as the signal comes, even while the main thread waits in native code for a
    peer that is dead, where no handler of Python's runs.
    """
    told = Told(env)
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = signal.signal(signal.SIGTERM, told.note)
    listening, waking = socket.socketpair()
    waking.setblocking(False)
    fd_before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    Thread(target=_listen, args=(listening, told, stuck), name="sigterm", daemon=True).start()
    try:
        yield told
    finally:
        told.inside = False
        signal.set_wakeup_fd(fd_before)
        waking.close()
        signal.signal(signal.SIGTERM, before)


def _listen(listening: socket.socket, told: Told, stuck: Callable[[Told], None]) -> None:
    """The C level writes a signal's number here at once; Python's handler runs when the main thread comes back. Read to
    the end: later signals write here too."""
    first = True
    with listening:
        while received := listening.recv(64):
            if signal.SIGTERM in received and first:
                first, told.at = False, told.at or time.monotonic()
                stuck(told)


def done(name: str, work: Callable[[], object], speaks: Callable[[BaseException], bool]) -> int:
    """Do a program's `work`, whatever comes of it; the exit code for `leave`. On the rank that `speaks` for it
    an error of ours is told in one line, and any other with where it came from."""
    try:
        work()
    except TrainError as error:
        if speaks(error):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        return int(error.exit)
    except SystemExit as stopped:
        return _code(stopped)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - the process ends here, whatever it was, and by os._exit
        if isinstance(error, BrokenPipeError) and unread():
            return 128 + signal.SIGPIPE
        faults.report(error, speak=speaks(error))
        return int(Exit.FAILED)
    return int(Exit.OK)


def _code(stopped: SystemExit) -> int:
    """Of --help, or a signal; others that call sys.exit may give it a text."""
    if stopped.code is None or isinstance(stopped.code, int):
        return stopped.code or 0
    print(stopped.code, file=sys.stderr, flush=True)
    return int(Exit.FAILED)


def unread() -> bool:
    """Whether nobody reads our stdout any more (`… | head`): no error, and nothing to tell."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def leave(code: int, *, rank: int = 0) -> NoReturn:
    """End this process with `code`, without the interpreter's own exit, in which gloo may abort or hang.

    torchrun turns every failure into 1, so a deliberate end is also noted in the file that the node named. It ends all
    ranks as soon as one has gone: rank 0, which speaks for all, gets a moment, and so do those who listen to it.
    """
    if code and "RANK" in os.environ:
        time.sleep(1.0 if rank else 0.2)
    try:
        _note(code)
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:  # a full disk, a closed pipe: nothing may keep this process here
        with suppress(OSError, ValueError):
            if not isinstance(error, BrokenPipeError):
                print(f"train: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))


def _note(code: int) -> None:
    if code in _DELIBERATE and (path := os.environ.get(contract.EXIT_FILE)):
        with Path(path).open("a") as file:
            file.write(f"{int(code)}\n")
