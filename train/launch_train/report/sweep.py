"""Compare the points of a sweep: which settings they have, what came of each, and which is the best.

Drawn as parallel coordinates: one axis for each setting and one for the result, one line for each point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from launch_train.report.settings import spec_settings
from launch_train.report.summary import MEAN_ROWS, held_out, mean
from launch_train.runfolder.run import RunData

LABEL: Final = "launch-sweep"
"""The label of a run's spec that names its sweep."""
LOG_FROM: Final = 50
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
MOST_AXES: Final = 12
ROOM: Final = 0.08
"""Part of an axis that a text beside it needs."""
GAP, TOP, HEIGHT, MARGIN = 150, 34, 260, 70


@dataclass(frozen=True)
class Point:
    """A point: its run, the text of each swept setting, and its result (None: it has none)."""

    run: str
    settings: tuple[str, ...]
    result: float | None


@dataclass(frozen=True)
class Sweep:
    """The points of a sweep, the best first: those without a result come last."""

    name: str
    settings: tuple[str, ...]
    """The swept settings."""
    measure: str
    """What the result is: the lowest is the best. Empty: no point has one."""
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        """Return the best point; None: no point has a result."""
        return self.points[0] if self.points and self.points[0].result is not None else None


def sweep_of(runs: Sequence[RunData], settings: Sequence[Mapping[str, str]]) -> Sweep | None:
    """Return the sweep that all runs are points of, or None. `settings`: those of each run, as the page shows them."""
    names = set[str]()
    for run in runs:
        spec = run.plan.get("spec")
        labels = spec.get("labels") if isinstance(spec, Mapping) else None
        names.add(str(labels.get(LABEL, "")) if isinstance(labels, Mapping) else "")
    if len(runs) < 2 or len(names) > 1 or not (name := names.pop()):
        return None
    planned = sorted({name for run in runs for name in spec_settings(run)})
    swept = [name for name in planned if len({each.get(name, "") for each in settings}) > 1][:MOST_AXES]
    measure, results = measured(runs)
    points = [
        Point(run.id, tuple(each.get(name, "") for name in swept), result)
        for run, each, result in zip(runs, settings, results, strict=True)
    ]
    points.sort(key=lambda point: (point.result is None, point.result or 0.0))
    return Sweep(name, tuple(swept), measure, tuple(points))


def measured(runs: Sequence[RunData]) -> tuple[str, list[float | None]]:
    """Return what the points are compared by, and each one's value: the lowest held-out loss if any point has one, else
    the training loss at the end."""
    evaluated = [min(held_out(run)[1], default=None) for run in runs]
    if any(value is not None for value in evaluated):
        return "lowest held-out loss", evaluated
    last: list[Sequence[float]] = [run.series().values.get("loss", ())[-MEAN_ROWS:] for run in runs]
    trained = [mean(losses) if len(losses) and math.isfinite(sum(losses)) else None for losses in last]
    known = any(value is not None for value in trained)
    return f"loss (mean of the last {MEAN_ROWS} rows)" if known else "", trained


# --- The picture -----------------------------------------------------------------------------------------------------


class Axis:
    """A vertical axis: numbers, logarithmic if they span much, or texts in order."""

    def __init__(self, title: str, texts: Sequence[str]) -> None:
        self.title = title
        numbers = [_number(text) for text in texts if text]
        finite = [value for value in numbers if value is not None]
        self.is_numeric = bool(finite) and len(finite) == len(numbers)
        self.is_log = self.is_numeric and min(finite) > 0 and max(finite) / min(finite) >= LOG_FROM
        self._low, self._high = (min(finite), max(finite)) if self.is_numeric else (0.0, 0.0)
        self._texts = sorted(set(texts))

    def place(self, text: str) -> float | None:
        """Return where a value is, from 0 (top) to 1 (bottom); None: it has no place."""
        if not self.is_numeric:
            return self._texts.index(text) / max(1, len(self._texts) - 1)
        value = _number(text)
        if value is None:
            return None
        scale = math.log if self.is_log else float
        low, high = scale(self._low), scale(self._high)
        return 1 - (scale(value) - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Return the places and texts to write beside the axis: the first, the last, and those with room between."""
        places = sorted({(place, text or "not set") for text in self._texts if (place := self.place(text)) is not None})
        kept = [places[0], places[-1]]
        for place, text in places:
            if all(abs(place - other) >= ROOM for other, _ in kept):
                kept.append((place, text))
        return sorted(set(kept))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def draw_parallel_coordinates(sweep: Sweep) -> str:
    """Return the parallel coordinates as an image that needs no script."""
    results = ["" if point.result is None else f"{point.result:.6g}" for point in sweep.points]
    columns = [*zip(*(point.settings for point in sweep.points), strict=True)]
    axes = [Axis(title, texts) for title, texts in zip(sweep.settings, columns, strict=True)]
    if sweep.measure:
        axes.append(Axis(sweep.measure, results))
    values = [
        (*point.settings, *([result] if sweep.measure else []))
        for point, result in zip(sweep.points, results, strict=True)
    ]
    width = MARGIN * 2 + GAP * (len(axes) - 1)
    lines = []
    for point, texts in reversed([*zip(sweep.points, values, strict=True)]):  # the best on top
        places = [(at, axis.place(text)) for at, (axis, text) in enumerate(zip(axes, texts, strict=True))]
        path = " ".join(f"{MARGIN + at * GAP},{TOP + place * HEIGHT:.1f}" for at, place in places if place is not None)
        named = ", ".join(f"{axis.title} {text}" for axis, text in zip(axes, texts, strict=True) if text)
        kind = "point best" if point is sweep.best else "point"
        title = escape(f"{point.run}: {named}")
        lines.append(f'<polyline class="{kind}" points="{path}"><title>{title}</title></polyline>')
    label = f"Parallel coordinates of {len(sweep.points)} points; the table below has the same values"
    return (
        f"<div class=scroll><svg class=parallel width={width} height={TOP + HEIGHT + 20} "
        f'viewBox="0 0 {width} {TOP + HEIGHT + 20}" role=img aria-label="{escape(label)}">'
        f"{''.join(lines)}{''.join(_axis(axis, at) for at, axis in enumerate(axes))}</svg></div>"
    )


def _axis(axis: Axis, at: int) -> str:
    x, short = MARGIN + at * GAP, axis.title if axis.title.count(" ") else axis.title.rpartition(".")[2]
    title = (f"{short[:21]}…" if len(short) > 22 else short) + (" (log)" if axis.is_log else "")
    ticks = "".join(
        f"<text x={x + 6} y={TOP + place * HEIGHT + 4:.1f}>{escape(text[:20])}</text>" for place, text in axis.ticks()
    )
    return (
        f"<line class=axis x1={x} x2={x} y1={TOP} y2={TOP + HEIGHT} />"
        f"<text class=axis-title x={x} y={TOP - 14} text-anchor=middle>"
        f"{escape(title)}<title>{escape(axis.title)}</title></text>{ticks}"
    )
