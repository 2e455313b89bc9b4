"""Find a run or a sweep by its name, ID or path: on this machine, or in the cloud."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from launch_train.common.storage import Storage
from launcher.cli.flows.cloud import here, is_spec_file, not_searched, of_project, run_name_of, say_not_searched
from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.inputs.gather import project_of
from launcher.inputs.gcloud_config import setting
from launcher.jobs.job import RUN_ID
from launcher.runs.find import (
    RUNS,
    SHOWN,
    FoundRun,
    NoSuchRun,
    exact_run,
    look_up,
    named_runs,
    only_one,
    run_folders,
    searched,
    similar_names,
)
from launcher.runs.run_folder import open_run_folder
from launcher.runs.sweep.find import FoundSweep, Sweep, find_sweep, local_points
from launcher.spec.sweep import NAME
from launcher.text import plural

SWEEP_ID: Final = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{6}")
"""A name that launch has chosen. Any other name is first taken for a run's."""


def find_run(text: str, regions: Sequence[str] | None, *, last: bool) -> FoundRun:
    """Return the run with an ID, name or path, of a spec file, or of a job's number: see `only_run`.

    Raises:
        UsageError: no such run, several, or a sweep has that name.
        LaunchError: the cloud cannot be searched, and no run on this machine has that name.
    """
    match run_or_sweep(text, regions, last=last):
        case Sweep() as sweep:
            raise not_a_run(sweep)
        case run:
            return run


def run_or_sweep(text: str, regions: Sequence[str] | None, *, last: bool | None = None) -> FoundRun | Sweep:
    """Return the run or the sweep that `text` names. Raises as `only_run`."""
    may_be = may_be_sweep(text)
    likely = may_be and (SWEEP_ID.fullmatch(text) or (not regions and local_points(text)))
    if likely and (sweep := find_named(text, regions)):
        return sweep
    try:
        return only_run(text, regions, last)
    except NoSuchRun:
        if may_be and not likely and (sweep := find_named(text, regions)):
            return sweep
        raise


def find_named(text: str, regions: Sequence[str] | None) -> Sweep | None:
    """Return the sweep of that name; None: there is none. One on this machine does not hide billed jobs. With `regions`
    only the cloud is searched."""
    points = None if regions else local_points(text)
    cloud = cloud_sweep(text, regions)
    return Sweep(name=text, here=points, cloud=cloud) if points or cloud else None


def may_be_sweep(text: str) -> bool:
    """Return whether `text` may be a sweep's name: it is not an ID, a path, or the name of a folder in ./runs."""
    if not NAME.fullmatch(text) or re.fullmatch(RUN_ID, text):
        return False
    with suppress(UsageError):
        return exact_run(text) is None
    return False


def cloud_sweep(text: str, regions: Sequence[str] | None) -> FoundSweep | None:
    """Return the sweep in the cloud of that name; None: there is none, or the cloud cannot be searched."""
    try:
        return find_sweep(here(), text, searched(regions))
    except (UsageError, NotAuthorised):
        return None
    except LaunchError as error:
        say_not_searched(error)
        return None


def not_a_run(sweep: Sweep) -> UsageError:
    """Return the error of a sweep's name given to a command for runs, with the command for each point."""
    name = sweep.name
    runs = [run.id for run in sweep.runs] or sweep.known  # those that have begun, as far as is known
    commands = [repeated(name, run) for run in runs[:SHOWN]]
    more = [f"… and {len(runs) - len(commands)} more"] if len(runs) > len(commands) else []
    hint = f"launch status {name} shows its points. For one of them:"
    problem = f"{name} is a sweep of {plural(len(sweep.known), 'point')}, not a run"
    return UsageError(problem, "\n".join([hint, *commands, *more]))


def folders_of(text: str, regions: Sequence[str] | None, *, last: bool) -> Iterator[tuple[str, Storage]]:
    """Yield the ID and the folder of each run of a sweep, or those of the run that `text` means.

    Raises:
        UsageError: no such run or sweep, or the path is not a run folder.
        LaunchError: a run has no folder, or it is unreadable.
    """
    if not regions and may_be_sweep(text) and (points := local_points(text)) and points.runs:
        yield from ((run.id, open_run_folder(run.id, run.folder)) for run in reversed(points.runs))
        return
    match run_or_sweep(text, regions, last=last):
        case Sweep() as sweep:
            folders = sweep.cloud.folders if sweep.cloud else {}
            yield from ((name, open_run_folder(name, folder)) for name, folder in folders.items())
        case run:
            yield run.id, open_run_folder(run.id, run.folder)


def only_run(text: str, regions: Sequence[str] | None, last: bool | None) -> FoundRun:
    """Return the run with an ID, name or path, of a spec file, or of a job's number.

    A path is a run on this machine, and so is an ID with a digest that is in ./runs: no run in the cloud has the same.
    Any other name is looked for in both places: a local run must not hide a billed job. With `regions` only the cloud
    is searched. `last`: of several runs take the one that started last; None: the command has no such option.

    Raises:
        UsageError: no such run, not a run folder, or several runs have that name; the hint has the command for each.
        LaunchError: the cloud cannot be searched, and no run on this machine has that name.
    """
    name, spec = run_name_of(text), is_spec_file(text)
    exact = None if regions or spec else exact_run(text)
    if exact and ("/" in text or re.fullmatch(RUN_ID, text)):
        return exact
    runs_here = (exact,) if exact else () if regions else named_runs(name)
    there: tuple[FoundRun, ...] = ()
    if not runs_here or spec or setting("core/project", os.environ):  # a spec's launch.yaml may set a project
        cloud = None
        try:
            cloud = of_project(project_of(Path(text), "vertex")) if spec else here()
            there = look_up(cloud, name, searched(regions))
        except (UsageError, NotAuthorised, UnreachableError) as error:
            if not runs_here and isinstance(error, NotAuthorised | UnreachableError):
                problem = f"no run {text} in ./{RUNS}, and the cloud was not searched: {error.problem}"
                raise type(error)(problem, error.hint) from error
            if not runs_here and cloud is None:  # no project is set
                known = similar_names(text, (folder.name for folder in run_folders(Path(RUNS))))
                hint = f"{known or 'launch runs lists the runs.'} For one in the cloud:\n{error.hint}"
                raise UsageError(f"no run {text} in ./{RUNS}, and {error.problem}", hint) from error
            if not runs_here:
                raise
            answered = isinstance(error, NoSuchRun)
            if not answered:
                say_not_searched(error, always=bool(last) or isinstance(error, UnreachableError))
        else:
            answered = True
        with suppress(OSError):
            if answered:
                not_searched().unlink()
    if last:
        return max((*runs_here, *there), key=lambda run: run.job.begun)
    if not (runs_here and there) and (run := only_one(runs_here or there)):
        return run
    raise ambiguous_run(text, runs_here, there, can_take_last=last is not None)


def run_folder_of(run: str, regions: Sequence[str] | None, *, last: bool) -> tuple[str, Storage]:
    """Return the run's ID and its folder.

    Raises:
        UsageError: no such run, several, or the path is not a run folder.
        LaunchError: the run has no folder, or it is unreadable.
    """
    named_run = find_run(run, regions, last=last)
    return named_run.id, open_run_folder(named_run.id, named_run.folder)


def ambiguous_run(text: str, here: Sequence[FoundRun], there: Sequence[FoundRun], *, can_take_last: bool) -> UsageError:
    """Return the error of a name that several runs have, with a command for each, and one for the newest."""
    ids = {run.id for run in here}
    lines = []
    for run in here[:SHOWN]:
        lines.append((repeated(text, run.job.handle), f"{run.job.state} on this machine"))
    for run in there[:SHOWN]:
        words = (run.id, "--region", run.job.region) if run.id in ids or run.id == text else (run.id,)
        lines.append((repeated(text, *words), f"{run.job.state} in {run.job.place}"))
    count = len(here) + len(there)
    more = [f"… and {count - len(lines)} more"] if count > len(lines) else []
    if can_take_last:
        lines.append((repeated(text, text, "--last"), "the newest"))
    width = max(len(command) for command, _ in lines)
    listed = [f"{command:{width}}  # {state}" for command, state in lines]
    return UsageError(f"{count} runs match {text}", "\n".join([*listed, *more]))


def repeated(text: str, *words: str) -> str:
    """Return the command line that was typed, with other words in place of `text` or of the value in `--flag=text`."""
    typed = sys.argv[1:]
    for at, word in enumerate(typed):
        if word == text or (word.startswith("--") and word.partition("=")[2] == text):
            return shlex.join(["launch", *typed[:at], word.removesuffix(text) + words[0], *words[1:], *typed[at + 1 :]])
    return shlex.join(words)
