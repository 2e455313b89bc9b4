"""Shutdown signals of a custom script: SIGTERM, which it survives, and the node's preemption notice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType

from launch_train import metrics
from launch_train.common.process_exit import leave
from launch_train.common.shutdown_signal import PEER_SECONDS, ShutdownSignal, catch_sigterm
from launch_train.common.signal_registry import register_for_signals

ROWS_SECONDS = 1.5
"""Seconds for the last rows when this process exits."""


POLL_SECONDS = 0.1


def listen_for_shutdown(env: Mapping[str, str], handlers: ExitStack) -> ShutdownSignal:
    """Record SIGTERM from now on. A handler of the script's own stays installed; then only the node's notice counts."""
    register_for_signals(env)
    before = signal.getsignal(signal.SIGTERM)
    ours = isinstance(before, partial) and before.func is metrics._write_rows_and_die
    if not ours and before is not signal.SIG_DFL:
        return ShutdownSignal(env)
    shutdown = handlers.enter_context(catch_sigterm(env, _exit_if_stuck))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, partial(handle_sigterm, shutdown))
    return shutdown


def handle_sigterm(shutdown: ShutdownSignal, signum: int, frame: FrameType | None) -> None:
    """Record a preemption for `due`. Any other SIGTERM means that a peer has failed: exit."""
    shutdown.note(signum, frame)
    if not shutdown.preempted:
        raise SystemExit(128 + signum)


def _exit_if_stuck(shutdown: ShutdownSignal) -> None:
    """Exit from a thread once a peer has failed: the main thread may wait for that peer in native code.

    A preemption may turn into that later, when the node withdraws its notice.
    """
    shutdown.note(signal.SIGTERM, None)
    while shutdown.preempted:
        time.sleep(POLL_SECONDS)
    time.sleep(PEER_SECONDS)
    close_rows()
    leave(128 + signal.SIGTERM)


def close_rows() -> None:
    with suppress(Exception):  # the node sends what is left on the local disk
        metrics._default().close(ROWS_SECONDS)
