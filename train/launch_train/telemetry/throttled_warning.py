"""What a process says on stderr of a run folder that can't be reached."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

QUIET_SECONDS = 60.0
"""Between two lines that trouble has begun."""


class Trouble:
    """Says on stderr when it begins and when it is over, and not more than once a minute."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._since: float | None = None
        self._spoke = -inf

    def met(self, name: str, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None and now - self._spoke >= QUIET_SECONDS:
            self._since = self._spoke = now
            at, place = time.strftime("%H:%M:%S"), self._folder
            say(f"{name} can't be sent since {at}: {error}. Nothing is lost: it lies in {place} and is tried again")

    def over(self) -> None:
        if self._since is not None:
            say(f"{self._url} takes objects again, after {time.monotonic() - self._since:.0f} s")
            self._since = None


def say(line: str) -> None:
    """In one write, so that lines of several processes don't mix."""
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"train: {line}\n")
        sys.stderr.flush()
