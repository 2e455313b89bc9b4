"""`launch metrics`: print the metrics of a run, as a table, as curves or as data."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated

import typer

from launch_train.common.storage import Storage
from launch_train.report.samples import evaluation
from launch_train.runfolder import figure
from launch_train.runfolder.run import read_run
from launch_train.runfolder.starts import Columns, Record, RunMetrics
from launcher.cli.flows.find_run import run_folder_of
from launcher.cli.help_page import COMMON, OUTPUT, option
from launcher.cli.options import Last, Output, Regions
from launcher.cli.ui.documents import printed
from launcher.cli.ui.gpu_monitor import gpu_lines
from launcher.cli.ui.plot import MARKER, Points, chart
from launcher.cli.ui.run_summary import nonfinite_texts
from launcher.cli.ui.text import WIDTH, columns, printable, wrapped
from launcher.errors import LaunchError, UsageError
from launcher.gcp.storage import read_errors
from launcher.runs.metrics.gpu_nodes import Node, read_nodes
from launcher.runs.run_folder import read_results
from launcher.text import did_you_mean, listed, near, plural

ROWS = 20
"""Steps in the table without --all, spread over the run."""
FIRST = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "images_per_s", "step_s", "mfu", "memory_gb")
"""Columns of the built-in trainer, in order; a script's own metrics follow."""
SAMPLE_LINES = 8
"""Most lines of a sample's prompt, and of its continuation; the report has all."""
NAMED = 10
"""Most skipped steps to list."""
LATER = "They come after the first steps. A script needs launch_train.metrics or run.metrics:\ndocs/scripts.md"
HIDDEN = frozenset({"time"})


def metrics(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, ID, folder or spec, or a job's number.")],
    *,
    regions: Regions = None,
    last: Last = False,
    everything: Annotated[
        bool, option(OUTPUT, "--all", help=f"Print all steps, not {ROWS} spread over the run.")
    ] = False,
    plot: Annotated[bool, option(OUTPUT, "--plot", help="Draw curves instead of the table.")] = False,
    names: Annotated[
        list[str] | None,
        option(OUTPUT, "--metric", help="Draw this metric (default: loss); repeatable.", metavar="NAME"),
    ] = None,
    output_format: Annotated[
        Output, option(COMMON, "-o", help="Output format; json and yaml have every step.")
    ] = Output.text,
) -> None:
    """Print the metrics of a run, step by step.

    Reads the run's folder. Each step has one row, from the newest attempt that ran it. Evaluations, events and the
    state of the GPUs follow. With --plot, draws curves in the width of the terminal.
    """
    if (plot or names) and output_format is not Output.text:
        raise UsageError(f"--plot draws text, not {output_format}", f"For all values: launch metrics {run} -o json")
    name, folder = run_folder_of(run, regions, last=last)
    if plot or names:
        print("\n".join(plots(name, folder, names)))
        return
    found = read_results(folder)
    if found is None:
        raise no_metrics(name, folder.url)
    nodes = read_nodes(folder)
    table = metric_lines(name, found, len(found.rows) if everything else ROWS)
    page = chain(table, sample_lines(found.events), event_and_gpu_lines(found, nodes))
    data = {"run": name, "folder": folder.url, "rows": [*found.rows], "events": [*found.events]}
    nodes_data = [node.to_dict() for node in nodes]
    printed({**data, "nonfinite": found.nonfinite, "nodes": nodes_data}, output_format, page=page)


def no_metrics(run: str, folder: str) -> LaunchError:
    """Return the error of a run without metrics."""
    fix = f"launch status {run} shows its state." if folder.startswith("gs://") else LATER
    return LaunchError(f"{run} has written no metrics yet, in {folder}", fix)


def plots(run: str, folder: Storage, names: Sequence[str] | None) -> Iterator[str]:
    """Yield a chart for each metric, in the width of the terminal. Raises LaunchError: no such metric."""

    with read_errors():
        found = read_run(folder)
    series = found.series()
    if not series.steps:
        raise no_metrics(run, folder.url)
    for number, name in enumerate(
        names or ["loss" if "loss" in series.values else next(iter(sorted(series.values)), "")]
    ):
        if name not in series.values:
            known = sorted(series.values)
            fix = did_you_mean(near(name, known)) or f"It has {listed(known, 20)}."
            if name == "eval_loss" and found.evaluations():
                fix = "Evaluations are the marks in the chart of the loss: --metric loss"
            raise UsageError(f"{run} has no metric {name!r}", fix)
        evaluated = found.evaluations() if name == "loss" else {}
        yield from ("",) if number else ()
        yield from plot_lines(name, series, evaluated, shutil.get_terminal_size().columns)


def plot_lines(name: str, series: Columns, evaluated: Mapping[int, Record], width: int) -> Iterator[str]:
    """Yield the chart of one metric, with its title and what it leaves out."""
    values, steps = series.values[name], series.steps
    marks = Points([*evaluated], [float(event["loss"]) for event in evaluated.values()])
    yield f"{name} by step" + (f"; {MARKER}: held-out {name}" if evaluated else "")
    yield from chart(Points(steps, values), marks, max(40, width))
    if gaps := sum(1 for value in values if not math.isfinite(value)):
        yield f"{plural(gaps, 'step')} of {len(steps):,} without a finite value"


def metric_lines(run: str, found: RunMetrics, most: int) -> Iterator[str]:
    """Yield the table of steps, of at most 80 columns, and the evaluations."""
    rows = spread(found.rows, most)
    if not rows:
        yield f"{run}: no steps yet"
    names = fitting_columns(rows)
    table = [names, *([cell_text(figure(row, name)) for name in names] for row in rows)]
    yield from columns(table, ">") if rows else ()
    if len(rows) < len(found.rows):
        yield f"{len(rows)} of {len(found.rows)} steps (--all)"
    evals = spread([event for event in found.events if event["event"] == "eval"], most)
    if evals:
        yield ""
        shown = [name for name in ("step", "loss", "accuracy", "accuracy_top5") if name in evals[-1]]
        head = [name if name == "step" else f"eval_{name}" for name in shown]
        yield from columns([head, *([cell_text(figure(one, name)) for name in shown] for one in evals)], ">")


def sample_lines(events: Sequence[Record]) -> Iterator[str]:
    """Yield the first text of the newest evaluation with samples, or what its images were taken for."""
    found = next((one for event in reversed(events) if (one := evaluation(event))), None)
    if found and found.images:
        yield f"\nimages at step {found.step}"
        yield from (f"  {line}" for line in wrapped(", ".join(one.text for one in found.images), WIDTH - 2))
    elif found and found.texts:
        for name, text in zip((f"prompt at step {found.step}", "continued by the model"), found.texts[0], strict=True):
            yield f"\n{name}"
            yield from (f"  {printable(line)}"[:WIDTH] for line in text.splitlines()[:SAMPLE_LINES])


def event_and_gpu_lines(found: RunMetrics, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield the events of the run and the state of its GPUs, in at most 80 columns."""
    reported = {event.get("node", 0) for event in found.events if event["event"] == "gpu_error"}
    for texts in (
        [*nonfinite_texts(found), *event_texts(found.events)],
        [text for _, text in gpu_lines(nodes, reported)],
    ):
        if texts:
            yield ""
        for text in texts:
            first, *more = wrapped(text, WIDTH - 2)
            yield from (first, *(f"  {line}" for line in more))


def event_texts(events: Sequence[Record]) -> Iterator[str]:
    """Yield skipped steps, steps that ran out of memory, slow ranks, and GPU errors with the count of equal ones."""
    skipped = sorted({event["step"] for event in events if event["event"] == "non_finite" and "step" in event})
    if skipped:
        some = listed([str(step) for step in skipped], NAMED)
        yield f"skipped because of non-finite gradients: {'step' if len(skipped) == 1 else 'steps'} {some}"
    for event in events:
        if event["event"] == "out_of_memory":
            yield f"step {event.get('step')}: out of memory; micro-batch reduced to {event.get('micro_batch')}"
        if event["event"] == "slow_rank":
            seconds, usual = event.get("seconds") or 0.0, event.get("median") or 0.0
            yield f"step {event.get('step')}: rank {event.get('rank')} is slow: {seconds:.3g} s, median {usual:.3g} s"
    for text, count in Counter(gpu_error(one) for one in events if one["event"] == "gpu_error").items():
        yield f"{text} ({count} times)" if count > 1 else text


def gpu_error(event: Record) -> str:
    """Return `node 1, GPU 3: Xid 94: an uncorrectable memory error of this program alone`."""
    gpu = "a GPU" if event.get("gpu") is None else f"GPU {event['gpu']}"
    xid = f"Xid {event['xid']}: " if "xid" in event else ""
    doubt = "; results since then may be wrong" if event.get("doubtful") else ""
    return f"node {event.get('node', 0)}, {gpu}: {xid}{event.get('meaning', 'an error')}{doubt}"


def spread(rows: Sequence[Record], most: int) -> list[Record]:
    """Return at most `most` rows at equal distances, with the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(number * (len(rows) - 1) / (most - 1))] for number in range(most)]


def fitting_columns(rows: Sequence[Record]) -> list[str]:
    """Return the columns that have values and fit the width."""
    known = {name for row in rows for name in row if figure(row, name) is not None} - HIDDEN
    names = [*(name for name in FIRST if name in known), *sorted(known - set(FIRST))]
    chosen: list[str] = []
    used = -2
    for name in names:
        used += 2 + max(len(name), *(len(cell_text(figure(row, name))) for row in rows))
        if used > WIDTH:
            break
        chosen.append(name)
    return chosen


def cell_text(value: float | None) -> str:
    """Return a value as text; an empty text for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
