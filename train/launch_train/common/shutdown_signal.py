"""SIGTERM in a training process: record it, and tell a preemption from the failure of a peer."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from types import FrameType

from launch_train.common import contract

PEER_SECONDS = 3.0
"""Time that a rank has to exit by itself once a peer has failed, before its watching thread ends it."""
NOTICE_WAIT = 0.5
"""Seconds from a signal within which the node's notice may follow it."""


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
        self._is_noticed = False

    @property
    def preempted(self) -> bool:
        """The whole machine must stop, so all ranks can save.

        Without a node (no notice file) every signal means that. The node withdraws its notice when the processes of
        another node have failed. If the machine ends much later, the notice comes long before the signal. Slurm and
        systemd signal all processes at the same moment; so a signal without a notice means something else only after
        NOTICE_WAIT.
        """
        if not self._notice:
            return bool(self.signum)
        while not (is_noticed := os.path.exists(self._notice)):  # noqa: PTH110 - in each step
            if not self.signum or self._is_noticed or time.monotonic() - self.at > NOTICE_WAIT:
                break
            time.sleep(0.02)
        self._is_noticed = self._is_noticed or is_noticed
        return is_noticed

    @property
    def save_by(self) -> float:
        """time.monotonic() by which a checkpoint must be durable; infinity if nothing has reached this process."""
        with suppress(OSError, ValueError, IndexError):  # no node, no notice, or one written on a full disk
            until = float(Path(self._notice or os.devnull).read_text().split()[1])
            return time.monotonic() + until - time.time() - (contract.NOTICE_SECONDS - contract.SAVE_SECONDS)
        return self.at + contract.SAVE_SECONDS if self.at else math.inf

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
