"""The trainer's choices and their reasons: printed at the start, and recorded in the run folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Choice(NamedTuple):
    """One choice: `what` (compile), `chosen` (regional) and `why` (12 blocks alike; compiled once)."""

    what: str
    chosen: str
    why: str


def format_choices(choices: Iterable[Choice]) -> list[str]:
    """Format one line for each choice: `compile      regional: 12 blocks alike, compiled once`."""
    listed = list(choices)
    width = max((len(choice.what) for choice in listed), default=0)
    return [
        f"  {choice.what:<{width}}  {choice.chosen}" + (f": {choice.why}" if choice.why else "") for choice in listed
    ]
