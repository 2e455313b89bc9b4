"""Which failures of a registry pass by themselves, and how long they are waited for."""

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

PASSING: Final = (408, 429, 500, 502, 503, 504)
"""Status codes after which the same request may work."""

TRIES: Final = 5
"""Of one request, or of an upload without a new byte in between."""

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 8.0
"""The waits' bounds double from the one to the other."""

LONGEST_ASKED: Final = 120.0
"""Seconds that a registry's Retry-After is followed; one that asks for more is down for now."""


class Passing(Exception):
    """A failure that may pass: an answer such as 503, or none. `wish` is the registry's Retry-After in seconds."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Patience:
    """The retry budget for transient failures. Its random numbers don't affect other generators."""

    clock: Clock = REAL
    tries: int = TRIES
    jitter: Callable[[], float] = Random().random  # noqa: S311 - it spreads waits, and guards nothing

    def begin(self, what: str) -> Tries:
        """Yield the tries of one operation, which an error names."""
        return Tries(what, self)


class Tries:
    """Bounded tries, with an exponential wait before each but the first."""

    def __init__(self, what: str, patience: Patience) -> None:
        self.what = what
        self.failed = 0
        self._patience = patience

    def wait(self, error: Passing) -> None:
        """Wait before the next try. Raises RegistryError: it was the last, or the registry asks for too long a wait."""
        self.failed += 1
        if self.failed >= self._patience.tries or error.retry_after > LONGEST_ASKED:
            hint = "No image was changed. Try again later: what has arrived is not sent again."
            raise RegistryError(f"{self.what}: {error} (tried {self.failed} times)", hint) from error
        bound = min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** (self.failed - 1))
        self._patience.clock.sleep(max(error.retry_after, bound * (0.5 + self._patience.jitter() / 2)))

    def progressed(self) -> None:
        """Something new is done for good: all tries are open again."""
        self.failed = 0


def raise_if_passing(response: Response) -> None:
    """Raise Passing for an answer after which the same request may work."""
    if response.status_code in PASSING:
        raise Passing(said(response), _retry_after(response))


def _retry_after(response: Response) -> float:
    """Seconds to wait as the registry asks; 0 if it doesn't, or names a date."""
    text = response.headers.get("Retry-After", "")
    return float(text) if re.fullmatch(r"\d{1,6}", text) else 0.0
