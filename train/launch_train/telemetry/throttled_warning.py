"""Warn on stderr about an unreachable run folder, at most once a minute."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from math import inf
from pathlib import Path

MIN_INTERVAL_SECONDS = 60.0
"""Minimum time between two warnings."""


class ThrottledWarning:
    """Warns when uploads begin to fail and when they work again."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._since: float | None = None
        self._warned = -inf

    def failed(self, name: str, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None and now - self._warned >= MIN_INTERVAL_SECONDS:
            self._since = self._warned = now
            at, place = time.strftime("%H:%M:%S"), self._folder
            say(f"warning: uploading {name} fails since {at}: {error}. Nothing is lost: it is in {place}; retrying")

    def recovered(self) -> None:
        if self._since is not None:
            say(f"warning: {self._url} was not reachable for {time.monotonic() - self._since:.0f} s; uploads continue")
            self._since = None


def say(line: str) -> None:
    """Write a line to stderr in one write, so that lines of several processes don't mix."""
    with suppress(OSError, ValueError):  # stderr is closed
        sys.stderr.write(f"train: {line}\n")
        sys.stderr.flush()
