"""Rows that are read from lines of output."""

from __future__ import annotations

from typing import Any

import pytest

from launch_train.node.collector import LINE, LineMetrics

PLAIN = r"step (?P<step>\d+).*loss (?P<loss>[\d.]+|nan)"
NANO = r"(?:step|iter) (?P<step>\d+): (?:train loss (?P<train>[\d.]+), val loss (?P<val>[\d.]+)|loss (?P<loss>[\d.]+))"


def rows(regex: str, *chunks: str) -> list[dict[str, Any]]:
    """The rows of output that comes in chunks, without their times."""
    reader = LineMetrics(regex)
    found = [row for chunk in chunks for line in reader.lines(chunk.encode()) for row in reader.rows(line)]
    assert all(row.pop("time") > 0 for row in found)
    return found


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        (PLAIN, "step 1: loss 2.5\nstep 2: loss 2\n", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]),
        (PLAIN, "0%|  | step 1 loss 2.5\rstep 2 loss 2\r", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]),
        (PLAIN, "step 1: loss 2.5\nstep 1: loss 9\n", [{"step": 1, "loss": 2.5}]),  # the other rank
        (PLAIN, "step 2: loss 2.5\nstep 1: loss 9\n", [{"step": 2, "loss": 2.5}]),  # a slower rank
        (PLAIN, "step 1: loss ...\nstep: loss 2\nnothing\n", []),
        (PLAIN, f"step 1: {'x' * LINE} loss 2\nstep 2: loss 2\n", [{"step": 2, "loss": 2.0}]),
        (r"(?P<step>\S+) (?P<loss>\S+)", "1e3 5\nnan 5\ninf 5\nx 5\n", [{"step": 1000, "loss": 5.0}]),
        (
            NANO,
            "step 5: train loss 4.0, val loss 4.5\niter 5: loss 3.9, time 10ms\niter 6: loss 3.8, time 10ms\n",
            [
                {"step": 5, "train": 4.0, "val": 4.5},
                {"step": 5, "train": 4.0, "val": 4.5, "loss": 3.9},
                {"step": 6, "loss": 3.8},
            ],
        ),
    ],
)
def test_lines_become_rows_once_per_step(regex: str, text: str, expected: list[dict[str, Any]]) -> None:
    assert rows(regex, text) == expected
    assert rows(regex, *text) == expected, "byte by byte"


def test_a_value_that_is_not_finite_is_kept() -> None:
    (row,) = rows(PLAIN, "step 1: loss nan\n")
    assert row["loss"] != row["loss"]


def test_a_line_without_an_end_takes_no_memory() -> None:
    reader = LineMetrics(PLAIN)
    for _ in range(1000):
        assert reader.lines(b"x" * 1000) == []
    assert len(reader._rest) <= LINE + 1
    assert reader.lines(b"\nstep 1: loss 2\n") == ["step 1: loss 2"]
