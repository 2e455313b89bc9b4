"""The starts of a run's processes: the parts that each wrote, and which of its steps are valid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launch_train.common import contract


def parts_in_order(names: Iterable[str]) -> list[tuple[tuple[int, ...], str]]:
    """Return the parts (`contract.PART`) among the names of a run folder in the order in which they were written, each
    with its attempt, generation, node, part and variant."""
    matches = ((name, contract.PART.match(name)) for name in names)
    return sorted((tuple(map(int, match.groups("0"))), name) for name, match in matches if match)


def begins_after(events: Iterable[Mapping[str, Any]], first_step: int | None) -> int | None:
    """Return the step that a start resumed from; 0: from scratch; None: no event and no first step says it."""
    for event in events:
        if event["event"] == "resumed" and isinstance(event.get("step"), int):
            return int(event["step"])
    return None if first_step is None else first_step - 1


def last_valid_steps(begins: Sequence[int | None]) -> list[float]:
    """Return for each start of a run the last step that no later one has repeated, or infinity. `begins` has the step
    that each began after, the oldest start first.

    The run's state is that of its newest start, so whatever an older one recorded for later steps doesn't count.
    """
    limits, limit = [], math.inf
    for after in reversed(begins):
        limits.append(limit)
        limit = limit if after is None else min(limit, after)
    return limits[::-1]
