"""Single keys from a terminal. Without termios (Windows) or without a terminal there are none."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Keys:
    """Reads keys. `are_on`: whether there are any."""

    def __init__(self, handle: int | None) -> None:
        """`handle`: the terminal's file descriptor, already set to send single keys; None: no keys."""
        self._handle = handle

    @property
    def are_on(self) -> bool:
        return self._handle is not None

    def read(self, seconds: float) -> str:
        """Return the keys that were pressed within so many seconds, at the first one; an empty text: none."""
        if self._handle is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._handle], [], [], seconds)
        if not ready:
            return ""
        data = os.read(self._handle, 64)
        if not data:  # the terminal was closed
            self._handle = None
        return data.decode("utf-8", "replace")


if sys.platform == "win32":

    @contextmanager
    def single_keys() -> Iterator[Keys]:
        """Yield no keys: Windows has no termios."""
        yield Keys(None)

else:
    import termios
    import tty

    @contextmanager
    def single_keys() -> Iterator[Keys]:
        """Let the terminal send each key at once and echo none, and restore it at the end, whatever happens."""
        if not sys.stdin.isatty():
            yield Keys(None)
            return
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        try:
            tty.setcbreak(handle)
            yield Keys(handle)
        finally:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(handle, termios.TCSADRAIN, before)
