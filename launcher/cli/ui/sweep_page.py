"""Print a sweep: its plan as a table of points or with their requests, or the state of each point."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from launcher.cli.options import Output
from launcher.cli.ui import run_table
from launcher.cli.ui.documents import printed
from launcher.cli.ui.plan_page import WIDTH, closing_lines, labelled, machine_lines, target_text
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import columns, fit_columns, table_width
from launcher.runs.logs.line import clean_text
from launcher.runs.sweep.plan import point_settings
from launcher.text import plural, usd_text

if TYPE_CHECKING:
    from launcher.runs.run_list import ListedRun
    from launcher.runs.sweep.find import Sweep
    from launcher.runs.sweep.plan import SweepPlan

COLUMNS: Final = ("NAME", "TARGET", "STATE", "STEP", "LOSS", "COST", "SETTINGS")
LEAST: Final = 12
"""Fewest characters of SETTINGS: other columns make room."""


def show_sweep_plan(sweep: SweepPlan, output: Output) -> None:
    """Print a planned sweep."""
    printed(sweep.to_dict(), output, page=sweep_lines(sweep))


def sweep_lines(sweep: SweepPlan) -> Iterator[str]:
    """Yield the page of a planned sweep, in at most 80 columns."""
    first = sweep.points[0].plan
    yield f"{sweep.name}  {plural(len(sweep.points), 'point')} on {target_text(sweep.target, sweep.project)}"
    yield ""
    yield from labelled("machine", next(machine_lines(first, explain=False)))
    yield from labelled("output", sweep.output)
    yield from labelled("at most", total_text(sweep))
    yield ""
    yield from point_table(sweep)
    yield from closing_lines(sweep.warnings, sweep.target)


def total_text(sweep: SweepPlan) -> str:
    """Return the upper bound of all points together, with `limits.usd`."""
    if sweep.target == "local":
        return "nothing: it runs on this machine"
    total, limit = sweep.usd_at_most, sweep.usd_limit
    text = "unknown: the price of a machine is unknown" if total is None else f"{usd_text(total)} for all points"
    return f"{text} (limits.usd: {usd_text(limit)})" if limit is not None else text


def point_table(sweep: SweepPlan) -> Iterator[str]:
    """Yield a line for each point: its settings in columns, or in one column if the columns are too wide."""
    bounds = ["" if (usd := point.plan.limits.usd_at_most) is None else usd_text(usd) for point in sweep.points]
    cost = sweep.target != "local"
    ends = [[point.run, *([bound] if cost else [])] for point, bound in zip(sweep.points, bounds, strict=True)]
    settings = point_settings([point.values for point in sweep.points])
    head = ["point", *settings[0], "run", *(["at most"] if cost else [])]
    rows = [
        [str(number), *texts.values(), *end] for number, (texts, end) in enumerate(zip(settings, ends, strict=True), 1)
    ]
    lines = [*columns([head, *rows])]
    if max(map(len, lines)) <= WIDTH:
        yield from lines
        return
    yield from columns(
        [["point", *head[-len(ends[0]) :]], *([row[0], *end] for row, end in zip(rows, ends, strict=True))]
    )
    yield ""
    for number, texts in enumerate(settings, 1):
        yield from labelled(str(number), " ".join(f"{name}={value}" for name, value in texts.items()))


# --- The state of each point -----------------------------------------------------------------------------------------


def show_points(sweep: Sweep, output: Output) -> None:
    """Print the points of a sweep. Raises LaunchError: no project is set."""
    from launcher.inputs.gcloud_config import person
    from launcher.runs.run_list import listed_points
    from launcher.runs.sweep.find import runs_without_jobs

    others, errors = runs_without_jobs(sweep.cloud) if sweep.cloud else ([], [])
    for error in errors:
        say(error.problem)
    points_begun, waiting = listed_points(sweep, others, person(os.environ), time.time())
    points = [{"set": sweep.values.get(point.run), **run_table.listed_run_data(point)} for point in points_begun]
    lines = points_page(sweep, points_begun, waiting, max(run_table.WIDTH, shutil.get_terminal_size().columns))
    printed({"sweep": sweep.name, "points": points, "not_started": waiting}, output, page=lines)


def points_page(sweep: Sweep, begun: Sequence[ListedRun], waiting: Sequence[str], width: int) -> Iterator[str]:
    """Yield the table of the points, what could not be read, and a footer."""
    done = sum(point.state == "SUCCEEDED" for point in begun)
    yield clean_text(f"{sweep.name}  {done} of {plural(len(begun) + len(waiting), 'point')} succeeded")
    yield ""
    now, settings = time.time(), dict(zip(sweep.values, point_settings([*sweep.values.values()]), strict=True))
    rows = [
        {**run_table.run_row(point, now), "SETTINGS": settings_text(settings.get(point.run, {}))} for point in begun
    ]
    empty = dict.fromkeys(COLUMNS, "")
    rows += [
        {**empty, "NAME": clean_text(run), "STATE": "not started", "SETTINGS": settings_text(settings.get(run, {}))}
        for run in waiting
    ]
    yield from run_table.aligned(cut_settings([{name: row[name] for name in COLUMNS} for row in rows], width))
    for point in begun:
        if point.problem:
            yield clean_text(f"{point.run}: {point.problem}")
    yield run_table.footer(begun, 0)
    if begun:
        yield f"launch report {sweep.name} compares the points"


def settings_text(settings: Mapping[str, str]) -> str:
    """Return `lr=0.0001 batch_size=16`."""
    return clean_text(" ".join(f"{name}={value}" for name, value in settings.items()))


def cut_settings(rows: Sequence[Mapping[str, str]], width: int) -> list[dict[str, str]]:
    """Return the rows without empty columns, in `width` columns: SETTINGS is cut where it is too long."""
    others = fit_columns([{**row, "SETTINGS": row["SETTINGS"][:LEAST]} for row in rows], width, run_table.LESS)
    if "SETTINGS" not in others[0]:
        return others
    header = len("SETTINGS")
    room = max(header, width - table_width([{**row, "SETTINGS": ""} for row in others]) + header)
    texts = (row["SETTINGS"] for row in rows)
    return [
        {**row, "SETTINGS": text if len(text) <= room else f"{text[: room - 1]}…"}
        for row, text in zip(others, texts, strict=True)
    ]
