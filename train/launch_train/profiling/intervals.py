"""Sets of times: sorted lists of spans that don't touch each other. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """From `begin` up to `end`, which is later."""

    begin: float
    end: float


Times = Sequence[Span]
"""A set of times, as `union` makes it: sorted, and each span ends before the next begins."""


def union(spans: Iterable[Span]) -> list[Span]:
    """All times that are in one of the spans, which may come in any order, overlap, or be empty."""
    merged: list[Span] = []
    for begin, end in sorted(one for one in spans if one.end > one.begin):
        if merged and begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(end, merged[-1].end))
        else:
            merged.append(Span(begin, end))
    return merged


def intersect(one: Times, other: Times) -> list[Span]:
    """The times that are in both."""
    found: list[Span] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i].begin, other[j].begin), min(one[i].end, other[j].end)
        if begin < end:
            found.append(Span(begin, end))
        if one[i].end < other[j].end:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Times, other: Times) -> list[Span]:
    """The times of `one` that are not in `other`."""
    left: list[Span] = []
    j = 0
    for begin, end in one:
        while j < len(other) and other[j].end <= begin:
            j += 1
        k = j
        while k < len(other) and other[k].begin < end:
            if other[k].begin > begin:
                left.append(Span(begin, other[k].begin))
            begin = max(begin, other[k].end)  # noqa: PLW2901 - what is left of it
            k += 1
        if begin < end:
            left.append(Span(begin, end))
    return left


def length(times: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in times)
