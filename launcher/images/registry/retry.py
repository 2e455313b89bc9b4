"""Retry a registry's transient failures, with a bounded backoff."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from launcher.clock import REAL, Clock
from launcher.images.registry.errors import RegistryError, said

if TYPE_CHECKING:
    from requests import Response

TRANSIENT: Final = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work."""

TRIES: Final = 5
"""Tries of one request, or of an upload without progress."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 8.0
"""The backoff in seconds doubles from the first bound to the second."""

LONGEST_ASKED: Final = 120.0
"""The longest Retry-After, in seconds, that is followed. A registry that asks for more is considered down."""


class TransientError(Exception):
    """A transient failure: a status such as 503, or no response.

    `retry_after` is the registry's Retry-After in seconds.
    """

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


@dataclass(frozen=True)
class RetryPolicy:
    """The retry budget for transient failures. Its random numbers don't affect other generators."""

    clock: Clock = REAL
    tries: int = TRIES
    jitter: Callable[[], float] = Random().random  # noqa: S311 - it only spreads the waits

    def begin(self, what: str) -> Tries:
        """Return the tries of one operation. `what` names it in errors."""
        return Tries(what, self)


class Tries:
    """Bounded tries, with exponential backoff."""

    def __init__(self, what: str, policy: RetryPolicy) -> None:
        self.what = what
        self.failed = 0
        self._policy = policy

    def wait(self, error: TransientError) -> None:
        """Wait before the next try.

        Raises RegistryError: it was the last one, or the registry demands too long a wait.
        """
        self.failed += 1
        if self.failed >= self._policy.tries or error.retry_after > LONGEST_ASKED:
            hint = "No image was changed. Try again later: uploaded layers are not sent again."
            raise RegistryError(f"{self.what}: {error} (tried {self.failed} times)", hint) from error
        bound = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** (self.failed - 1))
        self._policy.clock.sleep(max(error.retry_after, bound * (0.5 + self._policy.jitter() / 2)))

    def progressed(self) -> None:
        """Reset the number of failed tries, after progress that can't be lost."""
        self.failed = 0


def raise_if_transient(response: Response) -> None:
    """Raise TransientError for a response after which the same request may work."""
    if response.status_code in TRANSIENT:
        seconds = response.headers.get("Retry-After", "")  # or a date, which is not followed
        raise TransientError(said(response), float(seconds) if re.fullmatch(r"\d{1,6}", seconds) else 0.0)
