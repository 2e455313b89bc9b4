"""Clean up messages of APIs and logs, and extract parts of them."""

from __future__ import annotations

import re

MOST = 500
"""Characters of a message that are shown."""


def plain(text: str) -> str:
    """Return a message as one line without control characters, shortened to MOST characters."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MOST else f"{line[: MOST - 2]} …"


def first(pattern: str, text: str) -> str:
    """Return the first group of the first match, ignoring case; empty if there is none."""
    match = re.search(pattern, text, re.IGNORECASE)
    return match[1] if match else ""


def either(*choices: str) -> str:
    """Return the first choice that is not empty."""
    return next(filter(None, choices), "")
