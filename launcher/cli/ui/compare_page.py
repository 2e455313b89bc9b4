"""Print several runs side by side: what differs, then their figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from string import ascii_uppercase
from typing import Any, Final, NamedTuple

from launch_train.common.text import elapsed
from launch_train.report.goodput import attempt_times
from launch_train.report.settings import Difference, differences
from launch_train.report.summary import Figure, Summary, metric_figures, run_figures, summarize
from launch_train.runfolder.run import RunData
from launcher.cli.ui.text import WIDTH, columns, printable, wrapped
from launcher.text import plural, usd_text

GAP: Final = 2
"""Spaces between two cells."""
NAME, CELL = 34, 21
"""Maximum width of a row's name and of a run's text in columns, so that two runs fit the page."""
Row = tuple[str, Sequence[str]]
"""A name, and a text for each run."""
UNKNOWN: Final = "–"


class Compared(NamedTuple):
    """A comparison of runs: ID and folder of each, its figures, the differences, and the figures side by side."""

    runs: tuple[tuple[str, str], ...]
    summaries: tuple[Summary, ...]
    differences: tuple[Difference, ...]
    figures: tuple[Figure, ...]


def compared(runs: Sequence[RunData], now: float) -> Compared:
    """Compare runs. `now`: Unix seconds."""
    summaries = tuple(summarize(run, attempt_times(run, now)) for run in runs)
    names = tuple((run.id, run.folder) for run in runs)
    return Compared(names, summaries, differences(runs), (*metric_figures(runs), *run_figures(summaries)))


def comparison_data(compared: Compared) -> dict[str, Any]:
    runs = [
        {"run": run, "folder": folder, "state": each.state, "step": each.step, "steps": each.steps}
        for (run, folder), each in zip(compared.runs, compared.summaries, strict=True)
    ]
    figures = [
        {
            "name": figure.name,
            "kind": figure.kind,
            "step": figure.step,
            "values": [*figure.values],
            "deltas": [*figure.deltas],
        }
        for figure in compared.figures
    ]
    different = [{"name": difference.name, "values": [*difference.values]} for difference in compared.differences]
    return {"runs": runs, "differences": different, "figures": figures}


# --- The page --------------------------------------------------------------------------------------------------------


def comparison_lines(compared: Compared) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    letters = [ascii_uppercase[place] if place < 26 else str(place + 1) for place in range(len(compared.runs))]
    for letter, (run, _), each in zip(letters, compared.runs, compared.summaries, strict=True):
        step = "" if each.step is None else f", step {each.step:,}" + (f" of {each.steps:,}" if each.steps else "")
        yield from wrapped(f"{letter}  {run}  {each.state}{step}", WIDTH)
    yield ""
    if compared.differences:
        yield from comparison_table(
            "what differs", letters, [(difference.name, difference.values) for difference in compared.differences]
        )
    else:
        yield "Spec, code, image and machine are the same."
    yield ""
    finals = {(figure.name, figure.values) for figure in compared.figures if figure.kind == "final"}
    shown = (
        figure for figure in compared.figures if figure.kind != "at_step" or (figure.name, figure.values) not in finals
    )
    figures = [(figure_name(figure), cells(figure)) for figure in shown]
    if figures:
        yield from comparison_table("figures", letters, figures)
        if rows := max(each.loss_rows for each in compared.summaries):
            yield f"loss: mean of the last {plural(rows, 'row')} up to each step; other metrics are as logged"
        if any(each.attempts > 1 for each in compared.summaries):
            yield "time, goodput and cost: of all attempts of a run"
    else:
        yield "No run has written metrics yet."


def figure_name(figure: Figure) -> str:
    """Return `held-out loss, at step 2,000`."""
    match figure.kind:
        case "at_step":
            return f"{figure.name}, at step {figure.step:,}"
        case None:
            return figure.name
        case kind:
            return f"{figure.name}, {kind}"


def cells(figure: Figure) -> tuple[str, ...]:
    """Return each run's value with its difference from the first run's: `2.5612 (-0.0531)`, `11,210 (+2.1%)`."""
    value, delta = FORMATS.get("tokens/s" if figure.name.endswith("/s") else figure.name, FORMATS["loss"])
    texts = []
    for place, (each, more) in enumerate(zip(figure.values, figure.deltas, strict=True)):
        first, difference = figure.values[0], more if more is not None and math.isfinite(more) else None
        against = "" if not place or first is None or difference is None else f" ({delta(difference, first)})"
        texts.append(UNKNOWN if each is None else f"{value(each)}{against}")
    return tuple(texts)


def _percent(delta: float, first: float) -> str:
    return f"{delta / first:+.1%}" if first else "+∞"


FORMATS: Final[dict[str, tuple[Callable[[float], str], Callable[[float, float], str]]]] = {
    "loss": (
        lambda value: f"{value:,.4f}" if abs(value) < 10_000 else f"{value:,.0f}",
        lambda delta, _: f"{delta:+,.4f}" if abs(delta) < 10_000 else f"{delta:+,.0f}",
    ),
    "tokens/s": (lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", _percent),
    "time": (elapsed, _percent),
    "goodput": (lambda value: f"{value:.1%}", lambda delta, _: f"{100 * delta:+.1f} points"),
    "cost": (lambda value: usd_text(value, approx=True), _percent),
}
"""Figure -> text of its value, and of its difference from the first run's; other metrics are as the loss."""


def comparison_table(title: str, letters: Sequence[str], rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row, with a cell for each run. A row whose texts are too long for that follows at the end,
    with a line for each run."""
    texts = [(printable(name), [printable(value) or UNKNOWN for value in values]) for name, values in rows]
    short = [(name, values) for name, values in texts if len(name) <= NAME and max(map(len, values)) <= CELL]
    yield from in_columns([(title, letters), *short]) if short else (title,)
    for name, values in texts:
        if (name, values) not in short:
            yield name
            for letter, text in zip(letters, values, strict=True):
                first, *more = wrapped(f"{letter}  {text}", WIDTH - GAP)
                yield from (f"{'':{GAP}}{first}", *(f"{'':{GAP + 3}}{rest}" for rest in more))


def in_columns(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows. Runs that don't fit the width follow below, again beside the first run."""
    label = max(len(name) for name, _ in rows)
    first, *others = (max(map(len, column)) for column in zip(*(values for _, values in rows), strict=True))
    left = [*range(1, len(others) + 1)]
    while left:
        yield from () if left[0] == 1 else ("",)
        room, chosen = WIDTH - label - GAP - first, list[int]()
        while left and (not chosen or others[left[0] - 1] + GAP <= room):
            room -= others[left[0] - 1] + GAP
            chosen.append(left.pop(0))
        yield from columns([(name, values[0], *(values[place] for place in chosen)) for name, values in rows])
