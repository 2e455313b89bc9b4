"""Retries of one call to Cloud Storage: exponential backoff with full jitter, until its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

from launch_train.common.backoff import Backoff
from launch_train.common.errors import OutputError
from launch_train.common.storage import errors

T = TypeVar("T")

LIMIT_SECONDS = 120.0
"""Time limit of one call, including waits; the default of Google's client."""

SILENCE_SECONDS = 30.0
"""Time limit of one request without a received byte."""

SHORTEST_SECONDS = 5.0
"""A request gets half of the remaining time, so that a stalled one leaves time for another, but at least this."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Bounds of the backoff in seconds: it doubles from the first to the second."""

TOO_LATE = 0.05
"""Remaining seconds that are not worth another attempt."""


class UnreachableError(OutputError):
    """The run folder was unreachable, or failed with retryable errors, until the time limit."""


class BudgetSpentError(Exception):
    """The time limit has passed; the cause is the error of the last attempt."""


@dataclass(frozen=True)
class RetryClock:
    """Clock and jitter. The random generator is separate: using the global one would change what a training run
    computes."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = Random().random


class RetryBudget:
    """The retries of one call. Called with a request, it returns one with retries, as Google's client wants its
    `retry`."""

    def __init__(self, seconds: float, world: RetryClock) -> None:
        self.seconds = seconds
        self.unsure = False
        """An attempt has failed that may have taken effect."""
        self._world = world
        self._until = world.clock() + seconds
        self._backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)

    def left(self) -> float:
        return self._until - self._world.clock()

    def timeout(self) -> float:
        """Return the connect and read timeout of one request."""
        left = max(self.left(), 0.001)
        return min(SILENCE_SECONDS, max(left / 2, SHORTEST_SECONDS), left)

    def __call__(self, request: Callable[[], T]) -> Callable[[], T]:
        return partial(self.run, request)

    def run(self, request: Callable[[], T]) -> T:
        """Return the result of the first successful attempt. Raises BudgetSpentError, and errors that a retry can't
        fix."""
        while True:
            try:
                return request()
            except Exception as error:
                if not errors.is_retryable(error):
                    raise
                self.unsure = True
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        requested = errors.retry_after(error)
        wait = max(requested, min(self._world.random() * self._backoff.wait(), self.left() / 2))
        if self.left() - wait < TOO_LATE:
            raise BudgetSpentError(f"tried for {self.seconds:.3g} s") from error
        self._world.sleep(wait)


CURRENT: ContextVar[RetryBudget | None] = ContextVar("budget", default=None)
"""The current call of this thread, whose time limit the connection respects."""
