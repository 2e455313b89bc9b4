"""Find runs of `launch local`: by ID or name in ./runs, or by path."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from launch_train.common import contract
from launcher.errors import UsageError
from launcher.text import did_you_mean, near

RUNS = "runs"
"""The default output of `launch local`, in the current folder."""
HIDDEN = "."
"""Prefix of folders that are not runs, such as a run that is being deleted."""
SHOWN = 10
"""Maximum number of runs that an error lists."""


class LocalRun(Struct, frozen=True):
    """A run folder on this machine; the path is absolute."""

    folder: Path

    @property
    def id(self) -> str:
        """Return the run ID: the folder's name."""
        return self.folder.name


def exact_run(text: str) -> LocalRun | None:
    """Return the run at a path, or with an ID in ./runs. Raises UsageError: a path that is not a run folder."""
    if text.startswith(("gs://", "projects/")):
        return None
    for path in (Path(text), Path(RUNS, text)):
        if is_run_folder(path):
            return LocalRun(path.resolve())
    if "/" in text or text in (".", "..", RUNS):
        path = Path(text)
        inside = runs_below(path) or runs_below(path.parent)
        problem = f"{path} is not a run folder" if path_exists(path) else f"folder {path} does not exist"
        if inside:
            raise UsageError(problem, f"Name one of these runs:\n{listed(inside)}")
        raise UsageError(problem, "Name a run folder (OUTPUT/RUN), or a run: launch runs lists the runs.")
    return None


def named_runs(name: str) -> tuple[LocalRun, ...]:
    """Return the runs with a name in ./runs, newest first."""
    return tuple(one for one in runs_below(Path(RUNS)) if is_named(one.id, name))


def is_named(run: str, text: str) -> bool:
    """Return whether `text` is a run's ID, or its name without the digest."""
    return run == text or re.fullmatch(rf"{re.escape(text)}-[0-9a-f]{{8}}(-\d+)?", run) is not None


def is_run_folder(path: Path) -> bool:
    """Return whether a folder has attempts, metrics or a plan."""
    return any(path_exists(path / name) for name in (contract.ATTEMPTS, contract.METRICS, contract.PLAN))


def path_exists(path: Path) -> bool:
    """Return whether a path exists; False for text that is too long for a path."""
    return os.path.exists(path)  # noqa: PTH110 -- Path.exists raises on such a name


def runs_below(folder: Path) -> tuple[LocalRun, ...]:
    """Return the run folders in a folder, newest first."""
    try:
        inside = [one for one in folder.iterdir() if not one.name.startswith(HIDDEN) and is_run_folder(one)]
        inside.sort(key=lambda one: (-one.stat().st_mtime, one.name))
    except OSError:
        return ()
    return tuple(dict.fromkeys(LocalRun(one.resolve()) for one in inside))  # a link to a run is the same run


def label_of(run: LocalRun, label: str) -> str:
    """Return a label of the run's spec; empty if it has none, or if its plan cannot be read."""
    try:
        text = (run.folder / contract.PLAN).read_bytes()
        if label.encode() not in text:  # most runs: parsing each plan would take a second for a thousand
            return ""
        return str(json.loads(text)["spec"]["labels"][label])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def similar_names(text: str, ids: Iterable[str]) -> str:
    """Return `Did you mean quickstart?` with the ID or name of a run that is most like a text; empty: none is."""
    names = [name for run in ids for name in (run, re.sub(r"-[0-9a-f]{8}(-\d+)?$", "", run))]
    return did_you_mean(near(text, names))


def listed(found: Sequence[LocalRun]) -> str:
    """Return the runs, one per line."""
    lines = [f"  {shown(one)}" for one in found[:SHOWN]]
    more = [f"  … and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    return "\n".join([*lines, *more])


def shown(run: LocalRun) -> str:
    """Return the path of a run relative to the current folder, in a form that cannot be taken for a name."""
    path = relative(str(run.folder))
    return path if "/" in path else f"./{path}"


def here_instead(text: str) -> str:
    """Return a hint that `text` is a run on this machine, for commands that only take runs in the cloud; else empty."""
    try:
        found = exact_run(text) or next(iter(named_runs(text)), None)
    except UsageError:
        return ""
    return f"{shown(found)} is a run on this machine: launch status {shown(found)}\n" if found else ""


def relative(folder: str) -> str:
    """Return the folder relative to the current one if it is inside it."""
    if folder.startswith("gs://"):
        return folder
    try:
        return str(Path(folder).relative_to(Path.cwd()))
    except ValueError:
        return folder
