"""Bold and colours of launch's own words, on a terminal only."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

MARK: Final = f"\x02{os.urandom(8).hex()}"
"""Begins a style of launch's own. Random, so that a text of others cannot have it."""


def styled(text: str, codes: str, stream: TextIO | None = None) -> str:
    """Return the text with a style (SGR codes: `1` bold, `31` red) if the stream (default: stdout) shows styles."""
    return f"{MARK}{codes}m{text}{MARK}0m" if getattr(stream or sys.stdout, "takes_styles", False) else text
