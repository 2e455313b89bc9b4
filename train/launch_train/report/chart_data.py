"""The charts of a report: which curves there are, and their points, reduced to what a chart can show."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any, Final

from launch_train.report.downsampling import downsample
from launch_train.runfolder.run import RunData
from launch_train.runfolder.starts import Columns, is_number

POINTS: Final = 2000
"""About so many points a curve: more than a screen has columns."""
MANY: Final = 8
"""Runs from which on their curves share the points, so that the page of a sweep opens quickly."""
MOST_GPUS: Final = 16
"""Curves of single GPUs in a chart; of more GPUs it shows the lowest, mean and highest value."""
MOST_OTHERS: Final = 40
"""Charts of a script's own metrics."""

KNOWN: Final = {
    "loss": ("Loss", "log"),
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", "log"),
    "tokens_per_s": ("Tokens per second", ""),
    "images_per_s": ("Images per second", ""),
    "step_s": ("Step time in seconds", ""),
    "mfu": ("Model FLOPs utilisation", ""),
    "memory_gb": ("Memory of a process in GB", ""),
}
"""Column -> the chart's title, and whether a logarithmic axis is offered."""
WITH: Final = {"step_s": {"data_s": "waiting for data"}}
"""Column -> columns that are curves of the same chart."""
NO_CHART: Final = frozenset({"micro_batch", "skipped"})

GPU: Final = {
    "util": "GPU utilisation",
    "memory_gb": "GPU memory in use in GB",
    "power_w": "GPU power in watts",
    "temp_c": "GPU temperature in °C",
}
HOST: Final = {"cpu": "CPU utilisation", "ram_gb": "RAM in use in GB"}


@dataclass(frozen=True)
class Curve:
    """One curve: its run's place in the report, label, values, and the x values of each kind that it has."""

    run: int
    label: str
    y: Sequence[float]
    x: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Chart:
    """Curves with one y axis. `by_time`: it has no steps."""

    title: str
    curves: tuple[Curve, ...]
    log: bool = False
    by_time: bool = False
    share: bool = False
    """The values are shares from 0 to 1."""


def charts(runs: Sequence[RunData]) -> tuple[Chart, ...]:
    series = [run.series() for run in runs]
    tokens = [_tokens_by_row(rows) for rows in series]
    names = [name for name in KNOWN if any(name in rows.values for rows in series)]
    besides = {more for name in names for more in WITH.get(name, ())} | NO_CHART
    others = sorted({name for rows in series for name in rows.values} - {*KNOWN} - besides)
    by_metric = [_chart_of(name, runs, series, tokens) for name in [*names, *others[:MOST_OTHERS]]]
    accuracy = [
        Curve(place, label, *evaluations)
        for place, (run, rows, seen) in enumerate(zip(runs, series, tokens, strict=True))
        for name, label in {"accuracy": "first guess", "accuracy_top5": "first five"}.items()
        if (evaluations := _evaluations(run, rows, seen, name))
    ]
    by_metric.insert(1, Chart("Accuracy of evaluations", tuple(accuracy), share=True))
    drawn = (*(chart for chart in by_metric if chart.curves), *_machine_charts(runs))
    return drawn if len(runs) <= MANY else tuple(_thinned(chart, POINTS * MANY // len(runs)) for chart in drawn)


def _thinned(chart: Chart, most: int) -> Chart:
    """Return a chart with about so many points a curve."""
    curves = []
    for curve in chart.curves:
        kept = downsample([curve.y], most)
        x = {kind: [values[at] for at in kept] for kind, values in curve.x.items()}
        curves.append(replace(curve, y=[curve.y[at] for at in kept], x=x))
    return replace(chart, curves=tuple(curves))


def _chart_of(
    name: str, runs: Sequence[RunData], series: Sequence[Columns], tokens: Sequence[Sequence[float] | None]
) -> Chart:
    title, scale = KNOWN.get(name, (name, "log" if "loss" in name else ""))
    labels = {name: "step" if name == "step_s" else "train" if name == "loss" else "", **WITH.get(name, {})}
    curves: list[Curve] = []
    for place, (run, rows, seen) in enumerate(zip(runs, series, tokens, strict=True)):
        for column, label in labels.items():
            if column in rows.values:
                kept = downsample([rows.values[column]], POINTS)
                x: dict[str, Sequence[float]] = {"step": [rows.steps[at] for at in kept]}
                x["hours"] = [(rows.times[at] - run.begin) / 3600 for at in kept]
                if seen:
                    x["tokens"] = [seen[at] for at in kept]
                curves.append(Curve(place, label, [rows.values[column][at] for at in kept], x))
        if name == "loss" and (held_out := _evaluations(run, rows, seen)):
            curves.append(Curve(place, "held-out", *held_out))
    return Chart(title, tuple(curves), log=bool(scale))


def _tokens_by_row(rows: Columns) -> Sequence[float] | None:
    """Return the tokens that training has seen at each row; None: rows don't tell."""
    rate, seconds = rows.values.get("tokens_per_s"), rows.values.get("step_s")
    if not rate or not seconds:
        return None
    each = array("d", map(mul, rate, seconds))
    first = rows.steps[0] - 1
    mean = next(filter(math.isfinite, each), 0.0)
    if not math.isfinite(sum(each)):
        each = array("d", (value if math.isfinite(value) else mean for value in each))
    return array("d", accumulate(each, initial=first * mean))[1:]


def _evaluations(
    run: RunData, rows: Columns, tokens: Sequence[float] | None, name: str = "loss"
) -> tuple[list[float], dict[str, list[float]]] | None:
    """Return a value of the newest evaluation of each step, and the x values; None: there are none."""
    newest = {step: event for step, event in run.evaluations().items() if is_number(event.get(name))}
    if not newest:
        return None
    times: list[Any] = [event.get("time") for event in newest.values()]
    x: dict[str, list[float]] = {"step": [*newest]}
    x["hours"] = [(at - run.begin) / 3600 if is_number(at) else math.nan for at in times]
    if tokens:
        seen = dict(zip(rows.steps, tokens, strict=True))
        x["tokens"] = [seen.get(step, math.nan) for step in newest]
    return [float(event[name]) for event in newest.values()], x


# --- The machines -----------------------------------------------------------------------------------------------------


def _machine_charts(runs: Sequence[RunData]) -> Iterator[Chart]:
    for titles, curves_of in ((GPU, _gpu_curves), (HOST, _host_curves)):
        for name, title in titles.items():
            curves = []
            for place, run in enumerate(runs):
                for label, times, values in curves_of(run, name):
                    kept = downsample([values], POINTS)
                    x = {"hours": [(times[at] - run.begin) / 3600 for at in kept]}
                    curves.append(Curve(place, label, [values[at] for at in kept], x))
            if curves:
                yield Chart(title, tuple(curves), by_time=True, share=name in ("util", "cpu"))


Samples = tuple[str, Sequence[float], Sequence[float]]
"""A curve's label, the times of its samples in Unix seconds, and their values."""


def _gpu_curves(run: RunData, name: str) -> Iterator[Samples]:
    single: dict[tuple[int, Any], tuple[list[float], list[float]]] = {}
    for node, samples in run.monitor.items():
        for sample in samples:
            for gpu in sample.get("gpus") or ():
                if is_number(gpu.get(name)):
                    times, values = single.setdefault((node, gpu.get("gpu")), ([], []))
                    times.append(sample["time"])
                    values.append(float(gpu[name]))
    if len(single) <= MOST_GPUS:
        nodes = len({node for node, _ in single})
        for (node, gpu), (times, values) in sorted(single.items(), key=lambda item: str(item[0])):
            yield f"GPU {gpu}" if nodes == 1 else f"node {node} GPU {gpu}", times, values
        return
    by_time: dict[float, list[float]] = {}
    for times, values in single.values():
        for time, value in zip(times, values, strict=True):
            by_time.setdefault(time // 10 * 10, []).append(value)
    steps = sorted(by_time)
    for label, of in (("lowest GPU", min), ("mean", lambda all_: sum(all_) / len(all_)), ("highest GPU", max)):
        yield label, steps, [of(by_time[time]) for time in steps]


def _host_curves(run: RunData, name: str) -> Iterator[Samples]:
    for node, samples in sorted(run.monitor.items())[:MOST_GPUS]:
        pairs = [
            (sample["time"], float(host[name]))
            for sample in samples
            if isinstance(host := sample.get("host"), Mapping) and is_number(host.get(name))
        ]
        if pairs:
            times, values = zip(*pairs, strict=True)
            yield f"node {node}" if len(run.monitor) > 1 else "", times, values
