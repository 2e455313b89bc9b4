"""Pictures of a report that need no script: the timeline, and the charts for a browser without JavaScript."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final

from launch_train.report.chart_data import Chart
from launch_train.report.downsampling import downsample
from launch_train.report.goodput import PARTS, AttemptTime
from launch_train.runfolder.run import RunData

WIDTH, HEIGHT = 560, 220
LEFT, BOTTOM, TOP = 60, 24, 10
POINTS: Final = 300
TIMELINE: Final = 900
ROW: Final = 26
DASHES: Final = ("", *(f' stroke-dasharray="{dash}"' for dash in ("6 4", "2 3", "8 3 2 3")))
"""With several runs, each has its own colour, and its curves differ by their dashes."""


def draw_timeline(times: Sequence[AttemptTime]) -> str:
    """Return the attempts as bars over time, a colour for each part."""
    spans = [span for attempt in times for span in attempt.spans]
    begin, end = min((span.begin for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
    scale = (TIMELINE - LEFT) / max(end - begin, 1e-9)
    bars = []
    for row, attempt in enumerate(times):
        y = row * ROW + 4
        bars.append(f"<text x=0 y={y + 14}>{attempt.number}</text>")
        for span in attempt.spans:
            x, width = LEFT + (span.begin - begin) * scale, max(0.5, (span.end - span.begin) * scale)
            text = f"{span.part}: {span.end - span.begin:,.1f} s"
            bars.append(
                f'<rect class="part {span.part}" x={x:.1f} y={y} width={width:.1f} height={ROW - 8}>'
                f"<title>{escape(text)}</title></rect>"
            )
    height = len(times) * ROW + 8
    used = [part for part in ("queue", *PARTS) if any(attempt.parts[part] for attempt in times)]
    legend = "".join(
        f'<li><svg width=12 height=12><rect class="part {part}" width=12 height=12 /></svg> {part}' for part in used
    )
    picture = (
        f'<svg class=timeline viewBox="0 0 {TIMELINE} {height}" role=img aria-label="Timeline of the attempts">'
        f"{''.join(bars)}</svg>"
    )
    return f"{picture}<ul class=legend>{legend}</ul>"


def draw_chart(chart: Chart, runs: Sequence[RunData]) -> str:
    """Return a chart as an image, for a browser without JavaScript."""
    kind = "hours" if chart.by_time else "step"
    drawn = []
    for curve in chart.curves:
        if curve.x.get(kind):
            pairs = [(float(curve.x[kind][at]), curve.y[at]) for at in downsample([curve.y], POINTS)]
            drawn.append((curve, [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]))
    every = [point for _, points in drawn for point in points]
    if not every:
        return ""
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    y_low, y_high = min(y for _, y in every), max(y for _, y in every)
    x_scale = (WIDTH - LEFT - 10) / ((x_high - x_low) or 1.0)
    y_scale = (HEIGHT - BOTTOM - TOP) / ((y_high - y_low) or 1.0)
    lines = []
    counts = Counter[int]()
    for curve, points in drawn:
        color, dash = (curve.run, counts[curve.run]) if len(runs) > 1 else (sum(counts.values()), 0)
        counts[curve.run] += 1
        path = " ".join(
            f"{LEFT + (x - x_low) * x_scale:.1f},{HEIGHT - BOTTOM - (y - y_low) * y_scale:.1f}" for x, y in points
        )
        name = f"{runs[curve.run].id} {curve.label}".strip()
        style = f'class="line c{color % 8}"{DASHES[dash % len(DASHES)]}'
        lines.append(f'<polyline {style} points="{path}"><title>{escape(name)}</title></polyline>')
    labels = (
        f"<text x={LEFT - 6} y={TOP + 8} text-anchor=end>{y_high:.4g}</text>"
        f"<text x={LEFT - 6} y={HEIGHT - BOTTOM} text-anchor=end>{y_low:.4g}</text>"
        f"<text x={LEFT} y={HEIGHT - 6}>{x_low:.4g}</text>"
        f"<text x={WIDTH - 10} y={HEIGHT - 6} text-anchor=end>{kind} {x_high:.6g}</text>"
    )
    title = escape(chart.title)
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{title}">{labels}{"".join(lines)}</svg></figure>'
    )
