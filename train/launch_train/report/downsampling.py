"""Reduce a curve to as many points as a chart can show, without losing a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence


def downsample(columns: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return the places to keep of columns that share their x values, in order: about `most` for each column.

    The places are divided into equal stretches. Of each stretch and column the lowest and the highest value stay, as do
    the first and the last place, and the first value in a stretch that is not a number.
    """
    count = max((len(column) for column in columns), default=0)
    if count <= most:
        return [*range(count)]
    size = math.ceil(count / max(1, most // 2))
    kept = {0, count - 1}
    for column in columns:
        for begin in range(0, count, size):
            part = [*column[begin : begin + size]]  # an array would make its numbers anew each time
            if math.isfinite(sum(part)):
                kept |= {begin + part.index(min(part)), begin + part.index(max(part))}
            else:
                finite = [place for place, value in enumerate(part) if math.isfinite(value)]
                gaps = [place for place, value in enumerate(part) if not math.isfinite(value)][:1]
                extremes = {min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)} if finite else set()
                kept |= {begin + place for place in {*extremes, *gaps}}
    return sorted(kept)
