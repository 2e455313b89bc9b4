"""Curves as text."""

from __future__ import annotations

import math

import pytest

from launcher.cli.ui.plot import BARS, Points, chart, sparkline

NONE = Points([], [])


def drawn(x: list[float], y: list[float], marks: Points = NONE, width: int = 40) -> list[str]:
    found = [*chart(Points(x, y), marks, width)]
    assert max(map(len, found), default=0) <= width
    return found


def area(shown: list[str]) -> list[str]:
    """The lines right of the axis, all equally wide."""
    lines = [line[max(line.find("┤"), line.find("│")) + 1 :] for line in shown[:-2]]
    return [line.ljust(max(map(len, lines))) for line in lines]


@pytest.mark.parametrize("width", [40, 200])
def test_a_line_from_corner_to_corner(width: int) -> None:
    shown = drawn([1, 100], [0.0, 2.0], width=width)
    assert max(map(len, shown)) == width
    assert len(shown) == 14
    top, *_, bottom = area(shown)
    assert (bottom[0] != " ", bottom[-1], top[0], top[-1] != " ") == (True, " ", " ", True)
    assert all(any(row[column] != " " for row in area(shown)) for column in range(len(top)))  # no gap
    assert (shown[0].split()[0], shown[11].split()[0], shown[13].split()) == ("2", "0", ["1", "100"])


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_spike_stays_and_what_is_not_finite_is_a_gap(count: int) -> None:
    y = [1.0] * count
    y[count // 4] = 50.0
    for place in range(count // 2, 3 * count // 4):
        y[place] = (math.nan, math.inf)[place % 2]
    lines = area(drawn([*map(float, range(count))], y))
    wide = len(lines[0])
    columns = ["".join(row[column] for row in lines) for column in range(wide)]
    assert any(line.strip() for line in lines[:1])
    assert not "".join(columns[wide * 53 // 100 : wide * 72 // 100]).strip()
    assert "".join(columns[wide * 85 // 100 :]).strip()


def test_marks_are_seen() -> None:
    assert "".join(drawn([1, 2, 3], [1.0, 2.0, 3.0], Points([2], [2.0]))).count("o") == 1
    assert "".join(drawn([], [], Points([2, 3], [2.0, math.nan]))).count("o") == 1


@pytest.mark.parametrize(
    ("x", "y", "lines"), [([], [], 0), ([1], [math.nan], 0), ([1], [2.5], 14), ([1, 9], [3, 3], 14)]
)
def test_odd_curves(x: list[float], y: list[float], lines: int) -> None:
    assert len(drawn(x, y)) == lines


def test_sparklines() -> None:
    assert sparkline([1, 2, 3], 8) == BARS[0] + BARS[4] + BARS[7]
    assert sparkline([*range(1000)], 8) == BARS
    assert sparkline([1.0, math.nan, math.inf, 2.0], 4) == f"{BARS[0]}  {BARS[7]}"
    assert (sparkline([], 8), sparkline([math.nan], 8), sparkline([2, 2], 8)) == ("", " ", BARS[3] * 2)
