"""stdout and stderr in UTF-8 under any locale; a failed write to stdout is a LaunchError."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LaunchError


class Stdout(io.TextIOWrapper):
    """stdout in UTF-8; a failed write raises a LaunchError."""

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
    """Raise an OSError of stdout as a LaunchError, except for a closed pipe (`launch … | head`)."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot write to stdout: {error.strerror}") from error


def say(text: str) -> None:
    """Print a message of launch to stderr, of one or more lines, wrapped to the width of a terminal."""
    from launcher.cli.ui.plan_page import fitted

    for line in fitted(text, len("launch: ")).splitlines():
        print(f"launch: {line}", file=sys.stderr, flush=True)


def prepare() -> None:
    """Set up stdout and stderr of this process.

    Raises:
        LaunchError: stdout is closed.
    """
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open until the process ends
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="utf-8")
    if sys.stdout is None:
        raise LaunchError("stdout is closed", "The result is printed there; to discard it, use >/dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        lines = sys.stdout.line_buffering
        sys.stdout = Stdout(sys.stdout.detach(), "utf-8", errors="replace", line_buffering=lines)
