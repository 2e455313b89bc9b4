"""Run calls that may block forever on a daemon thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCall(Generic[T]):
    """Runs `function` on its own thread, one call at a time. An exception counts as the result None."""

    def __init__(self, function: Callable[[], T], name: str) -> None:
        self._function = function
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._results: SimpleQueue[T | None] = SimpleQueue()
        self._since: float | None = None
        # A daemon: a call that hangs in a driver must not keep the process from exiting.
        Thread(target=self._run, name=name, daemon=True).start()

    def call(self, timeout: float) -> T | None:
        """Start a call unless one is running, and wait up to `timeout` seconds. None on a timeout or an exception."""
        if self._since is None:
            self._since = time.monotonic()
            self._requests.put(True)
        try:
            result = self._results.get(timeout=timeout)
        except Empty:
            return None
        self._since = None
        return result

    def blocked_seconds(self) -> float:
        """Return for how many seconds the current call has been running; 0 if none is."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def close(self) -> None:
        """End the thread after its current call."""
        self._requests.put(False)

    def _run(self) -> None:
        while self._requests.get():
            try:
                self._results.put(self._function())
            except Exception:  # noqa: BLE001 - the next call tries again
                self._results.put(None)
