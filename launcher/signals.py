"""Raise SIGTERM and SIGHUP as exceptions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP was received: handled like Ctrl-C. `signum` is the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def signals_stop() -> Iterator[None]:
    """Raise Stopped on the first SIGTERM or SIGHUP (a closed terminal) inside the block.

    Replicas run in their own sessions, so these signals do not reach them. Only the main thread can set handlers; an
    ignored signal (nohup) stays ignored.
    """
    received: list[int] = []

    def stop(signum: int, _frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:  # a closed terminal sends several; the stop has already begun
            raise Stopped(signum)

    main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT inside the block, whatever the handler around it does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
