"""How a script of your own hears that it is to stop: SIGTERM, which it goes on through, and the node's notice."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import FrameType

from launch_train import metrics
from launch_train.common.process_exit import PEER_SECONDS, Told, heeding_sigterm, leave

ROWS_SECONDS = 1.5
"""What the last rows get when this process leaves."""


LOOK_SECONDS = 0.1


def listening(env: Mapping[str, str], handlers: ExitStack) -> Told:
    """SIGTERM is noted from now on. A handler of the script's own stays: then the node's notice alone counts."""
    before = signal.getsignal(signal.SIGTERM)
    ours = isinstance(before, partial) and before.func is metrics._write_and_die
    if not ours and before is not signal.SIG_DFL:
        return Told(env)
    told = handlers.enter_context(heeding_sigterm(env, _stuck))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, partial(heard, told))
    return told


def heard(told: Told, signum: int, frame: FrameType | None) -> None:
    """A preemption is noted for `due`. Otherwise a peer has failed, and this process is to end."""
    told.note(signum, frame)
    if not told.preempted:
        raise SystemExit(128 + signum)


def _stuck(told: Told) -> None:
    """From a thread: the main one may wait in native code for a peer that has failed, and not have heard yet. So it may
    later, when the node takes back its notice."""
    told.note(signal.SIGTERM, None)
    while told.preempted:
        time.sleep(LOOK_SECONDS)
    time.sleep(PEER_SECONDS)
    close_rows()
    leave(128 + signal.SIGTERM)


def close_rows() -> None:
    with suppress(Exception):  # what is left on this machine's disk the node sends
        metrics._default().close(ROWS_SECONDS)
