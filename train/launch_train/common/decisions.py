"""What the trainer decided by itself, or was told, and why: shown at the start, and kept in the run folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Choice(NamedTuple):
    """`what` (compile) was `chosen` (regional), because of `why` (12 blocks alike; compiled once)."""

    what: str
    chosen: str
    why: str


def lines(choices: Iterable[Choice]) -> list[str]:
    """A line each: `compile      regional: 12 blocks alike, compiled once`."""
    shown = list(choices)
    width = max((len(one.what) for one in shown), default=0)
    return [f"  {one.what:<{width}}  {one.chosen}" + (f": {one.why}" if one.why else "") for one in shown]
