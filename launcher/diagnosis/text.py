"""Other people's words, made fit for a sentence of ours."""

from __future__ import annotations

import re

MOST = 500
"""Characters of a message that are shown."""


def plain(text: str) -> str:
    """One line without control characters, and no longer than a person reads."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MOST else f"{line[: MOST - 2]} …"


def first(pattern: str, text: str) -> str:
    """The pattern's first group where it is found, whatever its case; else nothing."""
    found = re.search(pattern, text, re.IGNORECASE)
    return found[1] if found else ""


def either(*choices: str) -> str:
    """The first that says something."""
    return next(filter(None, choices), "")
