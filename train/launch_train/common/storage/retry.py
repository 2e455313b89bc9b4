"""How long a call to Cloud Storage goes on: tries with exponential back-off and full jitter, until its time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

from launch_train.common.errors import OutputError
from launch_train.common.storage import errors

T = TypeVar("T")

LIMIT_SECONDS = 120.0
"""For one call in all, its waits included: what Google's own client takes."""

SILENCE_SECONDS = 30.0
"""For one request without a byte."""

SHORTEST_SECONDS = 5.0
"""A request gets half of what is left, so that one that stalls leaves time for another, but no less than this."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds: the bounds of the waits double from the one to the other."""

TOO_LATE = 0.05
"""Seconds that are not worth another try."""


class UnreachableError(OutputError):
    """The run folder did not answer, or only with errors that pass, for as long as the call could wait."""


class GaveUpError(Exception):
    """No time is left; the cause is what the last try met."""


@dataclass(frozen=True)
class World:
    """The time. Its randomness is its own: drawing from the process's would change what a training run computes."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = Random().random


class Tries:
    """One call. Called with a request, it answers one that is tried again: the shape that Google's client takes for
    its `retry`."""

    def __init__(self, seconds: float, world: World) -> None:
        self.seconds = seconds
        self.unsure = False
        """Whether a try has failed that may have had its effect all the same."""
        self._world = world
        self._until = world.clock() + seconds
        self._failed = 0

    def left(self) -> float:
        return self._until - self._world.clock()

    def timeout(self) -> float:
        """Seconds for one request to connect, and for each of its silences."""
        left = max(self.left(), 0.001)
        return min(SILENCE_SECONDS, max(left / 2, SHORTEST_SECONDS), left)

    def __call__(self, request: Callable[[], T]) -> Callable[[], T]:
        return partial(self.run, request)

    def run(self, request: Callable[[], T]) -> T:
        """The result of the first try that works. Raises GaveUpError, and what can't pass at once."""
        while True:
            try:
                return request()
            except Exception as error:
                if not errors.may_pass(error):
                    raise
                self.unsure = True
                self._wait(error)

    def _wait(self, error: Exception) -> None:
        wish = errors.retry_after(error)
        wait = self._world.random() * min(LONGEST_WAIT, FIRST_WAIT * 2**self._failed)
        wait = max(wish, min(wait, self.left() / 2))
        self._failed += 1
        if self.left() - wait < TOO_LATE:
            raise GaveUpError(f"tried for {self.seconds:.3g} s") from error
        self._world.sleep(wait)


CURRENT: ContextVar[Tries | None] = ContextVar("tries", default=None)
"""The call that this thread is in: the connection keeps within its time."""
