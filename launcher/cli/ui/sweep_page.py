"""Print the state of each point of a sweep."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from launcher.cli.options import Output
from launcher.cli.ui import run_table
from launcher.cli.ui.documents import printed
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import WIDTH, fit_columns, table_width
from launcher.inputs.gcloud_config import person
from launcher.runs.logs.line import clean_text
from launcher.runs.run_list import ListedRun, listed_points
from launcher.runs.sweep.find import Sweep, runs_without_jobs
from launcher.runs.sweep.plan import point_settings
from launcher.text import plural

COLUMNS: Final = ("NAME", "TARGET", "STATE", "STEP", "LOSS", "COST", "SETTINGS")
LEAST: Final = 12
"""Fewest characters of SETTINGS: other columns make room."""


def show_points(sweep: Sweep, output: Output) -> None:
    """Print the points of a sweep. Raises LaunchError: no project is set."""
    others, errors = runs_without_jobs(sweep.cloud) if sweep.cloud else ([], [])
    for error in errors:
        say(error.problem)
    points_begun, waiting = listed_points(sweep, others, person(os.environ), time.time())
    points = [{"set": sweep.values.get(point.run), **run_table.listed_run_data(point)} for point in points_begun]
    lines = points_page(sweep, points_begun, waiting, max(WIDTH, shutil.get_terminal_size().columns))
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
