"""Suggestions, lists, counts, durations, money and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.text import (
    did_you_mean,
    either,
    exact_duration,
    hourly_price,
    listed,
    near,
    parse_duration,
    plural,
    rough_duration,
    size_text,
)

ROOT = Path(__file__).parent.parent
HOUR = 3600


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("regoins", ("regions", "region"), ["regions", "region"]),
        ("EU_WEST4", ("eu-west4", "us-west4"), ["eu-west4", "us-west4"]),
        ("x" * 10_000, ("x" * 80,), ["x" * 80]),
        ("zzz", ("regions",), []),
        ("a", (), []),
    ],
)
def test_near_words(word: str, known: tuple[str, ...], found: list[str]) -> None:
    assert near(word, known, most=3) == found


def test_the_nearest_word_comes_first_and_alone_by_default() -> None:
    assert near("vertx", ("vertices", "vertex")) == ["vertex"]
    assert near("vertx", ("vertex",), cutoff=1.0) == []


def test_words_in_a_sentence() -> None:
    assert [either("a"), either("ab"), either("abc")] == ["a", "a or b", "a, b or c"]
    assert did_you_mean(["a", "b"], "else") == "Did you mean a or b?"
    assert did_you_mean([], "else") == "else"
    assert [listed(list("abc"), 3), listed(list("abc"), 1), listed([], 1)] == ["a, b, c", "a and 2 more", ""]


def test_counts() -> None:
    counts = [(0, "GPU"), (1, "node"), (2000, "node"), (2, "process"), (1, "process")]
    assert [plural(*one) for one in counts] == ["0 GPUs", "1 node", "2,000 nodes", "2 processes", "1 process"]


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("6h", 6 * HOUR), ("2d", 48 * HOUR)])
def test_a_duration_is_read(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(6 * HOUR, "6 h"), (5400, "90 min"), (15.0, "15 s"), (3601, "3601 s"), (30 * HOUR, "30 h")]
)
def test_an_exact_duration(seconds: float, text: str) -> None:
    assert exact_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (45, "45 s"), (720, "12 min"), (3 * HOUR, "3 h"), (71 * HOUR, "71 h"), (26 * 24 * HOUR, "26 d")],
)
def test_a_rough_duration(seconds: float, text: str) -> None:
    assert rough_duration(seconds) == text


def test_a_price() -> None:
    assert hourly_price(2) == "$2.00/h"
    assert hourly_price(1234.5, approx=True) == "≈$1,234.50/h"
    assert hourly_price(2, bound=True) == hourly_price(None, 2) == "≤$2.00/h"
    assert hourly_price(None) == "price unknown"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_345, "12 kB"), (4_200_000, "4.2 MB"), (2_345_678_901, "2.3 GB")],
)
def test_a_size(count: int, text: str) -> None:
    assert size_text(count) == text
