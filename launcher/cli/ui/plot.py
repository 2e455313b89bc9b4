"""Curves as text: a chart of braille dots with axes, and sparklines. Pure.

plotext would draw charts too; since version 6 it ships compiled wheels, and the launcher runs on any platform.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from launch_train.report.downsampling import downsample

HEIGHT: Final = 12
"""Lines of a chart without its axis."""
DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bits of a braille character by row and column of its 4 × 2 dots."""
BRAILLE: Final = 0x2800
BARS: Final = "▁▂▃▄▅▆▇█"
MARKER: Final = "o"


class Points(NamedTuple):
    """Points of a curve, by x; a y that is not finite is a gap."""

    x: Sequence[float]
    y: Sequence[float]


def chart(curve: Points, marks: Points, width: int, height: int = HEIGHT) -> Iterator[str]:
    """Yield a chart of a curve, with `marks` as single markers, in `width` columns and `height` + 2 lines.

    A long curve keeps the lowest and the highest value of each stretch. Yields nothing if no value is finite.
    """
    places = downsample([curve.y], 4 * width)
    line = Points([curve.x[place] for place in places], [curve.y[place] for place in places])
    finite = [(x, y) for x, y in (*zip(*line, strict=True), *zip(*marks, strict=True)) if math.isfinite(y)]
    if not finite:
        return
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    labels = {
        0: f"{high:.4g}",
        height // 2: f"{high - (high - low) * (height // 2) / (height - 1):.4g}",
        height - 1: f"{low:.4g}",
    }
    if low == high:
        labels = {height // 2: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    canvas = Canvas(width - margin - 2, height, (first, last), (low, high))
    canvas.draw(line)
    for x, y in zip(*marks, strict=True):
        canvas.mark(x, y)
    for number, text in enumerate(canvas.lines()):
        yield f"{labels.get(number, ''):>{margin}} {'┤' if number in labels else '│'}{text}".rstrip()
    yield f"{'':{margin}} └{'─' * canvas.width}"
    begin, end = f"{first:,.0f}", f"{last:,.0f}"
    yield f"{'':{margin + 2}}{begin}{end if first < last else '':>{canvas.width - len(begin)}}".rstrip()


class Canvas:
    """Braille characters, and markers above them. `xs` and `ys` are the ranges of the values."""

    def __init__(self, width: int, height: int, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.width, self.height = width, height
        self._xs, self._ys = xs, ys
        self._cells = [[0] * width for _ in range(height)]
        self._marks: set[tuple[int, int]] = set()

    def draw(self, curve: Points) -> None:
        """Draw a line through the points, with a gap where a value is not finite."""
        points = [self._place(x, y) if math.isfinite(y) else None for x, y in zip(*curve, strict=True)]
        for point in points:
            if point:
                self._dot(*point)
        for one, other in pairwise(points):
            if one and other:
                (x, y), (x_end, y_end) = one, other
                steps = max(abs(x_end - x), abs(y_end - y), 1)
                for step in range(1, steps):
                    self._dot(round(x + (x_end - x) * step / steps), round(y + (y_end - y) * step / steps))

    def mark(self, x: float, y: float) -> None:
        """Put a marker on a point."""
        if math.isfinite(y):
            column, row = self._place(x, y)
            self._marks.add((row // 4, column // 2))

    def lines(self) -> Iterator[str]:
        """Yield the lines, from the top."""
        for row, cells in enumerate(self._cells):
            yield "".join(
                MARKER if (row, column) in self._marks else chr(BRAILLE + dots) if dots else " "
                for column, dots in enumerate(cells)
            )

    def _place(self, x: float, y: float) -> tuple[int, int]:
        """Return a point's dot: its column from the left and its row from the top."""
        return scaled(x, self._xs, 2 * self.width - 1), 4 * self.height - 1 - scaled(y, self._ys, 4 * self.height - 1)

    def _dot(self, column: int, row: int) -> None:
        self._cells[row // 4][column // 2] |= DOTS[row % 4][column % 2]


def scaled(value: float, within: tuple[float, float], most: int) -> int:
    """Scale a value from the range `within` to 0 … `most`; the middle if the range is empty."""
    low, high = within
    return round((value - low) / (high - low) * most) if high > low else most // 2


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` bars: the values, or means of equal parts of them; a blank where no value is finite."""
    count = min(width, len(values))
    stretches = [values[place * len(values) // count : (place + 1) * len(values) // count] for place in range(count)]
    finite = [[value for value in stretch if math.isfinite(value)] for stretch in stretches]
    means = [sum(each) / len(each) if each else math.nan for each in finite]
    known = [mean for mean in means if math.isfinite(mean)]
    if not known:
        return " " * count
    within = (min(known), max(known))
    return "".join(BARS[scaled(mean, within, len(BARS) - 1)] if math.isfinite(mean) else " " for mean in means)
