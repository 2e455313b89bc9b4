"""Exit of a training process: shutdown signals, exit codes, and the exit itself."""

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


PREEMPTION_SECONDS = 14.0
"""Seconds from the notice of a preemption to a durable checkpoint: less than torchrun gives its processes (Timing)."""

PEER_SECONDS = 3.0
"""Time that a rank has to exit by itself once a peer has failed, before its watching thread ends it."""


class ShutdownSignal:
    """A request to stop this process: whether and when it came, and what it means."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.signum = 0
        self.at = 0.0
        """time.monotonic() of the first signal."""
        self.saving = False
        """In the last piece of work: saving, or the end of the run."""
        self.inside = True
        """False once the loop is over."""
        self._notice = env.get(contract.NOTICE)

    @property
    def preempted(self) -> bool:
        """The whole machine must stop, so all ranks can save.

        Without a node (no notice file) every signal means that. The node withdraws its notice when the processes of
        another node have failed.
        """
        return bool(self.signum) and (not self._notice or Path(self._notice).exists())

    def raise_if_peer_failed(self) -> None:
        """Raise SystemExit if the signal means that a peer has failed: the ranks can no longer agree on anything."""
        if self.signum and not self.preempted:
            raise SystemExit(128 + self.signum)

    def note(self, signum: int, _frame: FrameType | None) -> None:
        """Handle the signal. A second one changes nothing."""
        if not self.signum:
            self.signum, self.at = signum, self.at or time.monotonic()


@contextmanager
def catch_sigterm(env: Mapping[str, str], on_signal: Callable[[ShutdownSignal], None]) -> Iterator[ShutdownSignal]:
    """Record SIGTERM instead of exiting. It needs the main thread; in others nothing changes.

    `on_signal` is called from a thread as soon as the signal comes, even while the main thread waits in native code for
    a dead peer, where no Python handler runs.
    """
    shutdown = ShutdownSignal(env)
    if threading.current_thread() is not threading.main_thread():
        yield shutdown
        return
    before = signal.signal(signal.SIGTERM, shutdown.note)
    listening, waking = socket.socketpair()
    waking.setblocking(False)
    fd_before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    Thread(target=_listen, args=(listening, shutdown, on_signal), name="sigterm", daemon=True).start()
    try:
        yield shutdown
    finally:
        shutdown.inside = False
        signal.set_wakeup_fd(fd_before)
        waking.close()
        signal.signal(signal.SIGTERM, before)


def _listen(listening: socket.socket, shutdown: ShutdownSignal, on_signal: Callable[[ShutdownSignal], None]) -> None:
    """Call `on_signal` at the first SIGTERM: CPython's C handler writes its number here at once.

    Later signals are read too, until the socket is closed.
    """
    first = True
    with listening:
        while received := listening.recv(64):
            if signal.SIGTERM in received and first:
                first, shutdown.at = False, shutdown.at or time.monotonic()
                on_signal(shutdown)


def run_program(name: str, work: Callable[[], object], should_report: Callable[[BaseException], bool]) -> int:
    """Run a program's `work` and return the exit code for `leave`, whatever happens.

    Where `should_report` returns true, a TrainError is printed as one line, any other with a traceback.
    """
    try:
        work()
    except TrainError as error:
        if should_report(error):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        return int(error.exit)
    except SystemExit as stopped:
        return _code(stopped)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - the process ends here, by os._exit
        if isinstance(error, BrokenPipeError) and is_stdout_closed():
            return 128 + signal.SIGPIPE
        faults.report(error, visible=should_report(error))
        return int(Exit.FAILED)
    return int(Exit.OK)


def _code(stopped: SystemExit) -> int:
    """Return the exit code of a SystemExit; if it has a text, print it."""
    if stopped.code is None or isinstance(stopped.code, int):
        return stopped.code or 0
    print(stopped.code, file=sys.stderr, flush=True)
    return int(Exit.FAILED)


def is_stdout_closed() -> bool:
    """Return whether the reader of stdout has exited (`… | head`), which is no error."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def leave(code: int, *, rank: int = 0) -> NoReturn:
    """Exit with `code`, without the interpreter's own exit, in which gloo may abort or hang.

    torchrun turns every failure into 1, so a deliberate exit code is also written to the node's exit file. torchrun
    ends all ranks as soon as one exits, so rank 0, which prints errors, gets a moment, and so do the ranks that wait
    for it.
    """
    if code and "RANK" in os.environ:
        time.sleep(1.0 if rank else 0.2)
    try:
        _note(code)
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError) as error:  # a full disk, a closed pipe: the process must exit anyway
        with suppress(OSError, ValueError):
            if not isinstance(error, BrokenPipeError):
                print(f"train: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(int(code))


def _note(code: int) -> None:
    if code in _DELIBERATE and (path := os.environ.get(contract.EXIT_FILE)):
        with Path(path).open("a") as file:
            file.write(f"{int(code)}\n")
