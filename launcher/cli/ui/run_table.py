"""The list of runs: a table of 80 columns, and its data for scripts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from launcher.cli.ui.data import job_data
from launcher.cli.ui.job_text import machine_of
from launcher.cli.ui.text import WIDTH, columns, fit_columns
from launcher.runs.logs.line import clean_text
from launcher.runs.run_list import ListedRun, ListedSweep, RunList, group_sweeps
from launcher.text import plural, rough_duration, usd_text

SHOWN: Final = 30
"""Maximum number of rows without --all."""
EMPTY: Final = "-"
LEFT: Final = ("NAME", "TARGET", "MACHINE", "OWNER", "STATE", "SETTINGS")
"""Columns aligned to the left; the others are numbers."""
OWNER_DIGITS: Final = 8
LESS: Final = {"OWNER": "", "STEP": "/", "MACHINE": "", "TARGET": "", "AGE": ""}
"""Columns that are dropped from a table that is too wide, in this order; of STEP only the total (`fit_columns`)."""


def run_lines(run_list: RunList, *, everything: bool, fold: bool = True, width: int = WIDTH) -> Iterator[str]:
    """Yield the table, what could not be read, and a footer. `fold`: the runs of a sweep are one row."""
    entries = group_sweeps(run_list.runs) if fold else [*run_list.runs]
    shown = entries if everything else entries[:SHOWN]
    unsearched = "; the cloud was not searched" if run_list.unlisted else ""
    if not shown:
        yield f"No runs{unsearched}."
        return
    now = time.time()
    rows = [sweep_row(entry, now) if isinstance(entry, ListedSweep) else run_row(entry, now) for entry in shown]
    yield from aligned(fit_columns(rows, width, LESS))
    for entry in shown:
        if not isinstance(entry, ListedSweep) and entry.problem:
            yield clean_text(f"{entry.run}: {entry.problem}")
    yield f"{footer(run_list.runs, len(entries) - len(shown))}{unsearched}"
    if any(isinstance(entry, ListedSweep) for entry in shown):
        yield "The points of a sweep: launch status NAME"


def sweep_row(sweep: ListedSweep, now: float) -> dict[str, str]:
    """Return the cells of a sweep: its best loss and the cost of all its runs."""
    newest, best = run_row(sweep.runs[0], now), sweep.best
    return {
        **newest,
        "NAME": clean_text(sweep.name),
        "STATE": f"{sweep.finished} of {sweep.points} succeeded",
        "STEP": "",
        "LOSS": loss_text(best.loss) if best and best.loss is not None else "",
        "COST": newest["COST"] and ("?" if sweep.usd is None else usd_text(sweep.usd)),
    }


def run_row(run: ListedRun, now: float) -> dict[str, str]:
    """Return a run's cells by column."""
    progress = run.progress
    return {
        "NAME": clean_text(run.run),
        "TARGET": run.target,
        "MACHINE": "" if run.job.is_here else machine_of(run.job),
        "OWNER": clean_text(run.owner[:OWNER_DIGITS]),
        "STATE": "unreadable" if run.problem else run.state,
        "AGE": rough_duration(now - run.created),
        "STEP": "" if progress is None else f"{progress.step}" + (f"/{progress.steps}" if progress.steps else ""),
        "LOSS": "" if progress is None or progress.loss is None else loss_text(progress.loss),
        "COST": "" if run.target == "local" else "?" if run.usd is None else usd_text(run.usd),
    }


def loss_text(loss: float) -> str:
    """Return a loss with four digits, or `nan`."""
    return f"{loss:.4g}" if math.isfinite(loss) else str(loss)


def aligned(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the header and the rows: text to the left, numbers to the right."""
    cells = [[*rows[0]], *([cell or EMPTY for cell in row.values()] for row in rows)]
    yield from columns(cells, "".join("<" if name in LEFT else ">" for name in rows[0]))


def footer(runs: Sequence[ListedRun], older: int) -> str:
    """Return `42 runs, 2 active, $12.30 so far; 12 older rows: --all`."""
    usd = sum(run.usd or 0.0 for run in runs)
    unknown = any(run.usd is None for run in runs)
    cost = f", {'more than ' if unknown else ''}{usd_text(usd)} so far" if usd or unknown else ""
    rest = f"; {plural(older, 'older row')}: --all" if older else ""
    return f"{plural(len(runs), 'run')}, {sum(run.is_active for run in runs)} active{cost}{rest}"


# --- For scripts -----------------------------------------------------------------------------------------------------


def list_data(run_list: RunList) -> dict[str, Any]:
    """Return the list for scripts; `unlisted` says why the runs in the cloud are missing."""
    problem = run_list.unlisted
    unlisted = {"problem": problem.problem, "hint": problem.hint} if problem else None
    sweeps = [sweep_data(entry) for entry in group_sweeps(run_list.runs) if isinstance(entry, ListedSweep)]
    return {"runs": [listed_run_data(run) for run in run_list.runs], "sweeps": sweeps, "unlisted": unlisted}


def sweep_data(sweep: ListedSweep) -> dict[str, Any]:
    """Return a sweep for scripts; its runs are among the others."""
    best = sweep.best
    return {
        "name": sweep.name,
        "target": sweep.runs[0].target,
        "runs": [run.run for run in sweep.runs],
        "points": sweep.points,
        "finished": sweep.finished,
        "active": sum(run.is_active for run in sweep.runs),
        "best": {"run": best.run, "loss": best.loss} if best else None,
        "usd": None if sweep.runs[0].target == "local" else sweep.usd,
    }


def listed_run_data(run: ListedRun) -> dict[str, Any]:
    """Return a run with the keys of `launch status`; those that need a cloud are null for one on this machine."""

    return {
        **job_data(run.run, run.job),
        "target": run.target,
        "owner": run.owner or None,
        "progress": msgspec.to_builtins(run.progress),
        "usd": None if run.target == "local" else run.usd,
        "problem": run.problem or None,
    }
