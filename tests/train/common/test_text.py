"""Suggestions, counts, durations and large numbers."""

from __future__ import annotations

import pytest

from launch_train.common.text import clock, did_you_mean, format_duration, plural, si


def test_a_suggestion() -> None:
    assert did_you_mean("stps", {"seed": 1, "steps": 2}) == "did you mean steps?"
    assert did_you_mean("x" * 10_000, ["x" * 80]) == f"did you mean {'x' * 80}?"
    assert did_you_mean("zzz", ["steps"]) == did_you_mean("a", []) == ""


def test_counts() -> None:
    assert [plural(1, "rank"), plural(2, "rank"), plural(0, "process")] == ["1 rank", "2 ranks", "0 processes"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (99.4, "99.4"),
        (812, "812"),
        (999.7, "1.00k"),
        (12345, "12.3k"),
        (123456, "123k"),
        (1.21e6, "1.21M"),
    ],
)
def test_rates_have_three_figures(value: float, text: str) -> None:
    assert si(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (41.2, "0:41"), (725, "12:05"), (10800, "3:00:00")])
def test_times(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45.0, "45 s"), (0.06, "0.06 s"), (252.0, "4.2 min"), (8 * 3600.0, "8 h"), (1e6, "11.6 days")],
)
def test_spans(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words
