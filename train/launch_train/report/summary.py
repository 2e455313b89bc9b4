"""The figures of a run: how far it came, its losses and speed, its time and cost; and those of several side by side."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from launch_train.report.goodput import AttemptTime, goodput, total_usd
from launch_train.report.settings import first_event
from launch_train.runfolder.run import RunData
from launch_train.runfolder.starts import Columns, Record, is_number

MEAN_ROWS: Final = 10
"""The loss of a step is the mean of so many rows up to it: single ones vary too much to be compared."""
MEDIAN_OF: Final = 100_000
"""Values of which a median is taken: to sort a million takes longer than to read them."""
SPEEDS: Final = ("tokens_per_s", "images_per_s")
NOT_COMPARED: Final = frozenset({"lr", "step_s", "data_s", "mfu", "memory_gb", "micro_batch", "skipped", *SPEEDS})
"""Columns that say how training ran, not how well it learns."""
LOWEST, HIGHEST = ("loss", "perplexity", "ppl", "error", "mse", "mae"), ("acc", "f1", "auc", "bleu", "rouge", "reward")
"""Parts of a metric's name by which its best value is the lowest or the highest."""


@dataclass(frozen=True)
class Summary:
    """The figures of a run; None and empty: unknown."""

    state: str
    start: Record
    """The newest `start` event, which has the device, the precision and so on."""
    step: int | None
    steps: int | None
    loss: float | None
    """The mean of the last `loss_rows` rows."""
    loss_rows: int
    held_out: float | None
    lowest_held_out: float | None
    speed: float | None
    """The median, in `unit` per second."""
    unit: str
    starts: int
    attempts: int
    paid: float
    """Seconds in which the machines were paid for."""
    goodput: float | None
    """The share of paid time in steps that count."""
    usd: float | None
    is_local: bool


def summarize(run: RunData, times: Sequence[AttemptTime]) -> Summary:
    rows, start = run.series(), first_event(run, "start")
    losses: Sequence[float] = rows.values.get("loss", ())
    _, evaluated = held_out(run)
    config = start.get("config")
    steps = config.get("steps") if isinstance(config, Mapping) else start.get("steps")
    speed = next((name for name in SPEEDS if name in rows.values), "")
    return Summary(
        state=state_text(run),
        start=start,
        step=rows.steps[-1] if rows.steps else None,
        steps=steps if is_number(steps) else None,
        loss=mean(losses[-MEAN_ROWS:]) if len(losses) else None,
        loss_rows=min(MEAN_ROWS, len(losses)),
        held_out=evaluated[-1] if evaluated else None,
        lowest_held_out=min(evaluated) if evaluated else None,
        speed=median(rows.values[speed]) if speed else None,
        unit=speed.partition("_")[0],
        starts=len(run.starts),
        attempts=len(times),
        paid=sum(each.paid for each in times),
        goodput=goodput(times),
        usd=total_usd(times),
        is_local=run.plan.get("target") == "local",
    )


def state_text(run: RunData) -> str:
    """Return how a run ended, `running`, or `interrupted`; `no end recorded` if that is unknown."""
    recorded = run.attempts[-1].end if run.attempts else {}
    if run.starts and run.starts[-1].event("end") is not None:
        return "finished"
    if kind := recorded.get("kind"):
        return f"{kind}: {recorded.get('cause', '')}".rstrip(": ")
    if stopped := recorded.get("stopped"):
        return str(stopped)
    codes = recorded.get("exit_codes")
    if codes == {}:
        return "could not be started"
    if isinstance(codes, Mapping):
        numbers = [code for code in codes.values() if isinstance(code, int)]
        return f"ended with exit code {max(numbers, default='?')}" if any(codes.values()) else "succeeded"
    return {True: "running", False: "interrupted", None: "no end recorded"}[run.is_running]


# --- Several runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A metric of several runs: its value in each, None where a run doesn't have it.

    `kind` is final, best, or at_step with the newest `step` that all runs have; None for a single figure of a run.
    """

    name: str
    kind: Literal["final", "best", "at_step"] | None
    step: int | None
    values: tuple[float | None, ...]

    @property
    def deltas(self) -> tuple[float | None, ...]:
        """Return the difference of each value to the first run's."""
        first = self.values[0]
        return tuple(None if None in (value, first) else value - first for value in self.values)  # type: ignore[operator]


Curve = tuple[Sequence[int], Sequence[float]]
"""Steps in order, and the value of each; nan: not a finite number."""


def metric_figures(runs: Sequence[RunData]) -> tuple[Figure, ...]:
    """Return the held-out loss, the loss and the script's own metrics: final, best, and at the same step."""
    series = [run.series() for run in runs]
    own = sorted({name for rows in series for name in rows.values} - NOT_COMPARED - {"loss", "grad_norm"})
    curves: dict[str, list[Curve]] = {
        "held-out loss": [held_out(run) for run in runs],
        "loss": [smooth_loss(rows) for rows in series],
        **{name: [(rows.steps, rows.values.get(name, ())) for rows in series] for name in own},
    }
    return tuple(
        figure for name, each in curves.items() if any(steps for steps, _ in each) for figure in _figures(name, each)
    )


def held_out(run: RunData) -> Curve:
    """Return the loss of each evaluated step."""
    evaluations = run.evaluations()
    return [*evaluations], [float(event["loss"]) for event in evaluations.values()]


def smooth_loss(rows: Columns) -> Curve:
    """Return the loss of each step as the mean of the last MEAN_ROWS rows; nan where one of them is not finite."""
    losses = rows.values.get("loss", ())
    means = [mean(losses[max(0, end - MEAN_ROWS) : end]) for end in range(1, len(losses) + 1)]
    return (rows.steps, means) if means else ((), ())


def _figures(name: str, curves: Sequence[Curve]) -> list[Figure]:
    figures = [Figure(name, "final", None, tuple(values[-1] if len(values) else None for _, values in curves))]
    best: Callable[[Sequence[float]], float] | None = None  # unknown if the name doesn't say
    if any(part in name.lower() for part in LOWEST):
        best = min
    elif any(part in name.lower() for part in HIGHEST):
        best = max
    if best is not None:
        finite = [[value for value in values if math.isfinite(value)] for _, values in curves]
        figures.append(Figure(name, "best", None, tuple(best(values) if values else None for values in finite)))
    common = set.intersection(
        *({step for step, value in zip(*curve, strict=False) if not math.isnan(value)} for curve in curves)
    )
    if common:
        step = max(common)
        values = tuple(values[bisect_right(steps, step) - 1] for steps, values in curves)
        figures.append(Figure(name, "at_step", step, values))
    return figures


def run_figures(summaries: Sequence[Summary]) -> tuple[Figure, ...]:
    """Return the figures that each run has once: speed, time, goodput, cost."""
    units = {each.unit for each in summaries if each.unit}
    speed = [(f"{unit}/s", [each.speed if each.unit == unit else None for each in summaries]) for unit in sorted(units)]
    rows: list[tuple[str, list[float | None]]] = [
        *speed,
        ("time", [each.paid or None for each in summaries]),
        ("goodput", [each.goodput for each in summaries]),
        ("cost", [each.usd if each.paid and not each.is_local else None for each in summaries]),
    ]
    return tuple(Figure(name, None, None, tuple(values)) for name, values in rows if any(v is not None for v in values))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """Return the upper median of the finite values; nan: none is finite. Of many values, a part is enough."""
    some = values if len(values) <= MEDIAN_OF else Random(0).sample(values, MEDIAN_OF)  # any stride may have a pattern
    finite = sorted(filter(math.isfinite, some))
    return finite[len(finite) // 2] if finite else math.nan
