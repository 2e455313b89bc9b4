"""Sets of times, as sorted lists of disjoint spans. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """Half-open interval from `begin` to `end`, with begin < end."""

    begin: float
    end: float


Times = Sequence[Interval]
"""A set of times as `union` returns it: sorted, and each span ends before the next begins."""


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Return the union of spans, which may be unsorted, overlapping or empty."""
    merged: list[Interval] = []
    for begin, end in sorted(span for span in spans if span.end > span.begin):
        if merged and begin <= merged[-1].end:
            merged[-1] = Interval(merged[-1].begin, max(end, merged[-1].end))
        else:
            merged.append(Interval(begin, end))
    return merged


def intersect(times: Times, other: Times) -> list[Interval]:
    """Return the times in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(times) and j < len(other):
        begin, end = max(times[i].begin, other[j].begin), min(times[i].end, other[j].end)
        if begin < end:
            common.append(Interval(begin, end))
        if times[i].end < other[j].end:
            i += 1
        else:
            j += 1
    return common


def subtract(times: Times, other: Times) -> list[Interval]:
    """Return the times in `times` but not in `other`."""
    left: list[Interval] = []
    j = 0
    for begin, end in times:
        while j < len(other) and other[j].end <= begin:
            j += 1
        k = j
        while k < len(other) and other[k].begin < end:
            if other[k].begin > begin:
                left.append(Interval(begin, other[k].begin))
            begin = max(begin, other[k].end)  # noqa: PLW2901 - the rest of the span
            k += 1
        if begin < end:
            left.append(Interval(begin, end))
    return left


def length(times: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in times)
