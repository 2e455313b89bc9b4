"""`launch rm`: delete runs that have ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from launcher.cli.flows.confirm import confirmed, other_owner_of
from launcher.cli.flows.find_run import run_or_sweep
from launcher.cli.help_page import COMMON, option
from launcher.cli.options import Regions
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError, UsageError
from launcher.runs.find import RUNS, FoundRun
from launcher.runs.logs.line import clean_text
from launcher.runs.removing import Removable, removable_run, remove_run, remove_sweep_records
from launcher.runs.sweep.find import Sweep, runs_without_jobs
from launcher.text import listed, plural, relative

SHOWN = 20
"""Most runs that a question lists."""
NAMED = 5
"""Maximum number of steps or files that the question names."""


class Deletion(NamedTuple):
    """A run to delete, and what would be deleted."""

    run: FoundRun
    data: Removable


def rm(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Names, IDs or folders of runs, or sweeps.")],
    *,
    regions: Regions = None,
    yes: Annotated[bool, option(COMMON, "--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """Delete runs that have ended, or all runs of a sweep.

    Deletes their folders with all checkpoints, and the records of their jobs. Asks first. Refuses a run that is still
    running. In a bucket with soft delete, the objects can be restored for some days.
    """
    for text in runs:
        if link := next((path for path in (Path(text), Path(RUNS, text)) if path.is_symlink()), None):
            raise UsageError(f"{link} is a link, so it is not deleted", f"Name the run itself: {link.resolve()}")
    named: dict[str, FoundRun] = {}
    sweeps: list[Sweep] = []
    for text in runs:
        match run_or_sweep(text, regions):
            case Sweep() as sweep:
                sweeps.append(sweep)
                others, errors = runs_without_jobs(sweep.cloud) if sweep.cloud else ([], [])
                if errors:
                    raise errors[0]
                named |= {run.job.name: run for run in (*sweep.runs, *others)}
            case run:
                named[run.job.name] = run
    chosen = [Deletion(run, removable_run(run)) for run in named.values()]
    if not yes:
        print("\n".join(line for deletion in chosen[:SHOWN] for line in deletion_lines(deletion)), file=sys.stderr)
        if len(chosen) > SHOWN:
            print(f"… and {plural(len(chosen) - SHOWN, 'more run')}", file=sys.stderr)
        count = plural(len(chosen), "run")
        repeat = f"launch rm {' '.join(runs)} --yes"
        if not confirmed(f"Delete {count} permanently?", "launch rm asks for confirmation", repeat):
            raise LaunchError("nothing was deleted")
    for deletion in chosen:
        remove_run(deletion.run, deletion.data, say)
        print(f"{deletion.data.run} deleted")
    for sweep in sweeps:
        remove_sweep_records(sweep)


def deletion_lines(deletion: Deletion) -> Iterator[str]:
    """Yield the lines that describe what will be deleted."""
    job, data = deletion.run.job, deletion.data
    where = f"{plural(len(data.objects), 'file')} in {relative(data.folder)}" if data.folder else "no folder"
    state = job.state if job.is_here else f"{job.state} in {job.place}"
    yield clean_text(f"{data.run}: {state}; {where}")
    if data.checkpoints:
        yield f"  checkpoints: step {listed([str(step) for step in data.checkpoints], NAMED)}"
    if data.user_files:
        yield clean_text(f"  files that launch did not write: {listed(data.user_files, NAMED)}")
    if owner := other_owner_of(job):
        yield f"  it {owner}"
