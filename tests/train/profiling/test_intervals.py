"""Sets of times, held against sets of whole numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from launch_train.profiling.trace import Interval, intersect, length, subtract, union

spans = st.lists(
    st.builds(lambda a, b: Interval(min(a, b), max(a, b)), st.integers(0, 30), st.integers(0, 30)), max_size=8
)


def moments(times: list[Interval]) -> set[int]:
    return {moment for begin, end in times for moment in range(int(begin), int(end))}


def is_in_order(times: list[Interval]) -> bool:
    apart = all(one.end <= other.begin for one, other in pairwise(times))
    return apart and all(one.begin < one.end for one in times)


@given(spans, spans)
def test_they_are_sets(some: list[Interval], others: list[Interval]) -> None:
    one, other = union(some), union(others)
    assert moments(one) == moments(some)
    assert moments(intersect(one, other)) == moments(one) & moments(other)
    assert moments(subtract(one, other)) == moments(one) - moments(other)
    for times in (one, other, intersect(one, other), subtract(one, other)):
        assert is_in_order(times)
    assert length(one) == len(moments(one))
