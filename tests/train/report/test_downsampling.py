"""A curve keeps its spikes however much it is reduced."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from launch_train.report.downsampling import downsample

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@given(VALUES, st.integers(2, 40))
def test_extremes_ends_and_gaps_stay(values: list[float], most: int) -> None:
    kept = downsample([values], most)
    assert kept == sorted({*kept})
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[place] for place in kept if math.isfinite(values[place])]
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    if values:
        assert {0, len(values) - 1} <= {*kept}
        assert any(not math.isfinite(values[place]) for place in kept) == (len(finite) < len(values))
    assert len(kept) <= max(most, 1.5 * most + 4)


def test_a_single_spike_in_a_million() -> None:
    values = [random.Random(1).random() for _ in range(10)] * 100_000
    values[654_321] = 99.0
    kept = downsample([values], 2000)
    assert 654_321 in kept
    assert len(kept) < 2100
