"""stdout and stderr: the same bytes under any locale, and a disk that is full ends in a line."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LaunchError


class Stdout(io.TextIOWrapper):
    """stdout in UTF-8. What can't be written there is launch's own error, told like every other."""

    def write(self, text: str) -> int:
        """Raises LaunchError."""
        with stdout_errors():
            return super().write(text)

    def flush(self) -> None:
        """Raises LaunchError."""
        with stdout_errors():
            super().flush()


@contextmanager
def stdout_errors() -> Iterator[None]:
    """An OSError of stdout as a LaunchError; a reader that has enough (`launch … | head`) is none."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"stdout can't be written: {error.strerror}") from error


def prepare() -> None:
    """Make this process's streams those of launch.

    Raises:
        LaunchError: stdout is closed, so that the result would be lost.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open as long as we run
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8")
    if sys.stdout is None:
        raise LaunchError("stdout is closed", "The result is printed there; >/dev/null discards it.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        lines = sys.stdout.line_buffering
        sys.stdout = Stdout(sys.stdout.detach(), "utf-8", errors="replace", line_buffering=lines)
