"""SIGTERM and SIGHUP as exceptions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: all is stopped as after Ctrl-C. `signum` is which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def signals_stop() -> Iterator[None]:
    """SIGTERM and SIGHUP (the terminal has gone) raise Stopped inside, once: replicas have sessions of their own, so
    nothing else would reach them. Only the main thread can set handlers; what is ignored (nohup) stays so."""
    told: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        told.append(signum)
        if len(told) == 1:  # a closed terminal sends several: the stop is under way
            raise Stopped(signum)

    main = threading.current_thread() is threading.main_thread()
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if main and signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
