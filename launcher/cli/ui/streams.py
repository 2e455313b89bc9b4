"""stdout and stderr in UTF-8 under any locale; a failed write to stdout is a LaunchError."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TextIO

from launcher.cli.style import MARK
from launcher.errors import LaunchError

CONTROL: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
"""Characters that move a terminal's cursor, change its title, or reverse the text's direction."""
COLOR: Final = r"\x1b\[[0-9;:]*m"
"""Colours and styles, which many programs write to their logs."""
OVERWRITTEN: Final = r" ?\r(?:[^\r\n]*\r)*"
"""The states of a progress bar before its last one, which a terminal overwrites."""
CLEAR: Final = "\r\x1b[K"
"""Erases the line; launch's own progress line begins with it."""


class Escaped(io.TextIOWrapper):
    """A stream without control characters: names and texts in a run folder may be anybody's.

    They are escaped as JSON escapes them, so that a document stays the same. Colours are left out, and what a progress
    bar overwrites. A text may begin with CLEAR, and have the styles of `styled`.
    """

    @property
    def takes_styles(self) -> bool:
        """Return whether this is a terminal that shows bold and colours, and NO_COLOR is not set."""
        return self.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")

    def write(self, text: str) -> int:
        """Write the text escaped."""
        if not text.replace("\n", "").isprintable():  # nearly all texts are: the patterns are seldom needed
            head = CLEAR if text.startswith(CLEAR) else ""
            plain = re.sub(OVERWRITTEN, " ", re.sub(COLOR, "", text.removeprefix(head)))
            if not self.takes_styles:
                plain = re.sub(rf"{MARK}[\d;]+m", "", plain)
            escaped = (re.sub(CONTROL, lambda char: f"\\u{ord(char[0]):04x}", part) for part in plain.split(MARK))
            text = head + "\x1b[".join(escaped)
        return super().write(text)


def unescaped(stream: TextIO) -> TextIO:
    """Return a stream to the same terminal that also takes control characters, for a screen that escapes its texts."""
    if not isinstance(stream, Escaped):
        return stream
    stream.flush()
    return open(stream.fileno(), "w", encoding="utf-8", closefd=False)


class Stdout(Escaped):
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
    from launcher.cli.ui.text import fitted

    for line in fitted(text, len("launch: ")).splitlines():
        print(f"launch: {line}", file=sys.stderr, flush=True)


def prepare_streams() -> None:
    """Set up stdout and stderr of this process. Raises LaunchError: stdout is closed."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 -- open until the process ends
    elif isinstance(sys.stderr, io.TextIOWrapper):
        lines = sys.stderr.line_buffering
        sys.stderr = Escaped(sys.stderr.detach(), "utf-8", errors="backslashreplace", line_buffering=lines)
    if sys.stdout is None:
        raise LaunchError("stdout is closed", "The result is printed there; to discard it, use >/dev/null.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        lines = sys.stdout.line_buffering
        sys.stdout = Stdout(sys.stdout.detach(), "utf-8", errors="replace", line_buffering=lines)
