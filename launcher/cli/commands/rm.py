"""`launch rm`: delete runs that have ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from launcher.cli.help_page import COMMON, option
from launcher.cli.options import Regions
from launcher.errors import LaunchError, UsageError
from launcher.text import listed, plural

if TYPE_CHECKING:
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.find_run import FoundRun
    from launcher.runs.removing import Removable
    from launcher.runs.sweep.find import Sweep

SHOWN = 20
"""Most runs that a question lists."""
NAMED = 5
"""Maximum number of steps or files that the question names."""


class Deletion(NamedTuple):
    """The deletion of a run: its data, its state, another account that owns it (or empty), and the function to call."""

    what: Removable
    state: str
    owner: str
    delete: Callable[[], None]


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
    from launcher.cli.flows.confirm import confirmed
    from launcher.cli.flows.find_run import run_or_sweep
    from launcher.runs.find_local_run import RUNS, LocalRun
    from launcher.runs.removing import remove_sweep_records
    from launcher.runs.sweep.find import Sweep

    for text in runs:
        if link := next((path for path in (Path(text), Path(RUNS, text)) if path.is_symlink()), None):
            raise UsageError(f"{link} is a link, so it is not deleted", f"Name the run itself: {link.resolve()}")
    named = [(run_or_sweep(text, regions), text) for text in runs]
    pairs = [(run, text) for one, text in named for run in (points(one) if isinstance(one, Sweep) else (one,))]
    found = {(one if isinstance(one, LocalRun) else one.id): (one, text) for one, text in pairs}
    chosen = [local(one) if isinstance(one, LocalRun) else in_cloud(one, text) for one, text in found.values()]
    if not yes:
        print("\n".join(line for one in chosen[:SHOWN] for line in lines(one)), file=sys.stderr)
        if len(chosen) > SHOWN:
            print(f"… and {plural(len(chosen) - SHOWN, 'more run')}", file=sys.stderr)
        count = plural(len(chosen), "run")
        repeat = f"launch rm {' '.join(runs)} --yes"
        if not confirmed(f"Delete {count} permanently?", "launch rm asks for confirmation", repeat):
            raise LaunchError("nothing was deleted")
    for one in chosen:
        one.delete()
        print(f"{one.what.run} deleted")
    for sweep in (one for one, _ in named if isinstance(one, Sweep)):
        remove_sweep_records(sweep)


def points(sweep: Sweep) -> Sequence[LocalRun | FoundRun]:
    """Return all runs of a sweep. Raises LaunchError: one cannot be read."""
    from launcher.cli.flows.cloud import here
    from launcher.runs.sweep.find import runs_without_jobs

    others, errors = runs_without_jobs(here(), sweep.cloud) if sweep.cloud else ([], [])
    if errors:
        raise errors[0]
    return (*sweep.runs, *others)


def local(run: LocalRun) -> Deletion:
    """Return the deletion of a run on this machine. Raises UsageError: it is running, or no run."""
    from launch_train.common.storage import LocalFolder
    from launcher.runs.local_records import read_record
    from launcher.runs.removing import check_is_local_run, removable_folder, remove_local, still_running

    check_is_local_run(run)
    record = read_record(run.folder)
    if record and record.state == "RUNNING":
        raise still_running(run.id)
    what = removable_folder(run.id, LocalFolder(run.folder))
    return Deletion(what, record.state if record else "UNKNOWN", "", lambda: remove_local(run))


def in_cloud(run: FoundRun, text: str) -> Deletion:
    """Return the deletion of a run in the cloud. Raises LaunchError: it may not be deleted."""
    from launcher.cli.flows.cloud import of_run
    from launcher.cli.flows.confirm import other_owner
    from launcher.cli.ui.streams import say
    from launcher.runs.removing import removable_run, remove_run

    cloud = of_run(text)[0]
    what = removable_run(cloud, run)
    state = f"{run.job.state} in {run.job.place}"
    return Deletion(what, state, other_owner(run.job.labels), lambda: remove_run(cloud, run, what, say))


def lines(one: Deletion) -> Iterator[str]:
    """Yield the lines that describe what will be deleted."""
    from launcher.runs.find_local_run import relative
    from launcher.runs.logs.line import clean_text

    what = one.what
    where = f"{plural(len(what.objects), 'file')} in {relative(what.folder)}" if what.folder else "no folder"
    yield clean_text(f"{what.run}: {one.state}; {where}")
    if what.checkpoints:
        yield f"  checkpoints: step {listed([str(step) for step in what.checkpoints], NAMED)}"
    if what.user_files:
        yield clean_text(f"  files that launch did not write: {listed(what.user_files, NAMED)}")
    if one.owner:
        yield f"  it {one.owner}"
