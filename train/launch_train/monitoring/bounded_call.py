"""Work that may hang for ever, done where nobody has to wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Does `work` in a thread of its own whenever it is asked, once at a time. An error of the work is no answer."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[T | None] = SimpleQueue()
        self._since: float | None = None
        # A daemon: a call into a driver that hangs must not hold the process back at its end.
        Thread(target=self._run, name=name, daemon=True).start()

    def answer(self, seconds: float) -> T | None:
        """Ask, unless it is still at it; None if the answer doesn't come in so many seconds, or is none."""
        if self._since is None:
            self._since = time.monotonic()
            self._asked.put(True)
        try:
            answer = self._answers.get(timeout=seconds)
        except Empty:
            return None
        self._since = None
        return answer

    def silent(self) -> float:
        """Seconds since it was asked what it has not answered; 0 if it has."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def close(self) -> None:
        """Ends the thread, if the work ends."""
        self._asked.put(False)

    def _run(self) -> None:
        while self._asked.get():
            try:
                self._answers.put(self._work())
            except Exception:  # noqa: BLE001 - whatever it is: it is looked at again the next time
                self._answers.put(None)
