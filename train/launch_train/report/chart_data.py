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
    """Return the charts of some runs, overlaid."""
    series = [run.series() for run in runs]
    tokens = [_tokens(rows) for rows in series]
    names = [name for name in KNOWN if any(name in each.values for each in series)]
    besides = {more for name in names for more in WITH.get(name, ())} | NO_CHART
    others = sorted({name for each in series for name in each.values} - {*KNOWN} - besides)
    by_metric = [_chart_of(name, runs, series, tokens) for name in [*names, *others[:MOST_OTHERS]]]
    accuracy = _accuracy(runs, series, tokens)
    every = (*(chart for chart in (*by_metric[:1], accuracy, *by_metric[1:]) if chart.curves), *_machine_charts(runs))
    return every if len(runs) <= MANY else tuple(_thinned(chart, POINTS * MANY // len(runs)) for chart in every)


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
    curves: list[Curve] = []
    for place, (run, rows, seen) in enumerate(zip(runs, series, tokens, strict=True)):
        labels = {name: "step" if name == "step_s" else "train" if name == "loss" else "", **WITH.get(name, {})}
        for column, label in labels.items():
            if column in rows.values:
                curves.append(_curve(place, label, rows, column, seen, run))
        if name == "loss" and (held_out := _evaluations(run, rows, seen)):
            curves.append(Curve(place, "held-out", *held_out))
    return Chart(title, tuple(curves), log=bool(scale))


def _accuracy(runs: Sequence[RunData], series: Sequence[Columns], tokens: Sequence[Sequence[float] | None]) -> Chart:
    """Return the accuracy of the evaluations; it has no curves if they have none."""
    curves = [
        Curve(place, label, *evaluations)
        for place, (run, rows, seen) in enumerate(zip(runs, series, tokens, strict=True))
        for name, label in {"accuracy": "first guess", "accuracy_top5": "first five"}.items()
        if (evaluations := _evaluations(run, rows, seen, name))
    ]
    return Chart("Accuracy of evaluations", tuple(curves), share=True)


def _curve(place: int, label: str, rows: Columns, column: str, tokens: Sequence[float] | None, run: RunData) -> Curve:
    kept = downsample([rows.values[column]], POINTS)
    x: dict[str, Sequence[float]] = {"step": [rows.steps[at] for at in kept]}
    x["hours"] = [(rows.times[at] - run.begin) / 3600 for at in kept]
    if tokens:
        x["tokens"] = [tokens[at] for at in kept]
    return Curve(place, label, [rows.values[column][at] for at in kept], x)


def _tokens(rows: Columns) -> Sequence[float] | None:
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
    steps = [*newest]
    x: dict[str, list[float]] = {"step": [*steps]}
    times: list[Any] = [newest[step].get("time") for step in steps]
    x["hours"] = [(at - run.begin) / 3600 if is_number(at) else math.nan for at in times]
    if tokens:
        seen = dict(zip(rows.steps, tokens, strict=True))
        x["tokens"] = [seen.get(step, math.nan) for step in steps]
    return [float(newest[step][name]) for step in steps], x


def _machine_charts(runs: Sequence[RunData]) -> Iterator[Chart]:
    for name, title in GPU.items():
        curves = [curve for place, run in enumerate(runs) for curve in _gpu_curves(place, run, name)]
        if curves:
            yield Chart(title, tuple(curves), by_time=True, share=name == "util")
    for name, title in HOST.items():
        curves = [curve for place, run in enumerate(runs) for curve in _host_curves(place, run, name)]
        if curves:
            yield Chart(title, tuple(curves), by_time=True, share=name == "cpu")


def _gpu_curves(place: int, run: RunData, name: str) -> Iterator[Curve]:
    single: dict[tuple[int, Any], tuple[list[float], list[float]]] = {}
    for node, samples in run.monitor.items():
        for sample in samples:
            for gpu in sample.get("gpus") or ():
                if _finite(gpu.get(name)):
                    times, values = single.setdefault((node, gpu.get("gpu")), ([], []))
                    times.append(sample["time"])
                    values.append(float(gpu[name]))
    if len(single) <= MOST_GPUS:
        nodes = len({node for node, _ in single})
        for (node, gpu), (times, values) in sorted(single.items(), key=lambda item: str(item[0])):
            label = f"GPU {gpu}" if nodes == 1 else f"node {node} GPU {gpu}"
            yield _by_time(place, label, times, values, run)
        return
    by_time: dict[float, list[float]] = {}
    for times, values in single.values():
        for time, value in zip(times, values, strict=True):
            by_time.setdefault(time // 10 * 10, []).append(value)
    steps = sorted(by_time)
    for label, of in (("lowest GPU", min), ("mean", lambda all_: sum(all_) / len(all_)), ("highest GPU", max)):
        yield _by_time(place, label, steps, [of(by_time[time]) for time in steps], run)


def _host_curves(place: int, run: RunData, name: str) -> Iterator[Curve]:
    for node, samples in sorted(run.monitor.items())[:MOST_GPUS]:
        pairs = [
            (sample["time"], float(host[name]))
            for sample in samples
            if isinstance(host := sample.get("host"), Mapping) and _finite(host.get(name))
        ]
        if pairs:
            label = f"node {node}" if len(run.monitor) > 1 else ""
            yield _by_time(place, label, [time for time, _ in pairs], [value for _, value in pairs], run)


def _by_time(place: int, label: str, times: Sequence[float], values: Sequence[float], run: RunData) -> Curve:
    kept = downsample([values], POINTS)
    return Curve(place, label, [values[at] for at in kept], {"hours": [(times[at] - run.begin) / 3600 for at in kept]})


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
