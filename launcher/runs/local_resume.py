"""Resume a local run with changed code, and suggest that instead of a new run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from launch_train import runfolder
from launch_train.common.config import is_resumable
from launcher.errors import UsageError
from launcher.images.source_files import File
from launcher.plan.binding import NewerFormat, read
from launcher.plan.model import Plan
from launcher.runs.find import RUNS, SHOWN, exact_run, is_named, named_runs, run_folders, similar_names
from launcher.runs.local_progress import read_local_progress
from launcher.runs.sweep.find import local_points
from launcher.services import request
from launcher.services.local.run_folder_job import read_job, shown
from launcher.text import listed, plural

CANDIDATES: Final = 20
"""Number of newest runs that are compared with a plan."""
NAMED: Final = 2
"""Most changed files that a message names."""


def stored_plan(path: Path) -> Plan | None:
    """Return the plan in a local run folder's file, or None if it is unreadable."""
    with suppress(OSError, NewerFormat):
        stored = read(path.read_bytes())
        return stored.plan if stored else None
    return None


def find_unfinished(plan: Plan, files: Sequence[File]) -> str:
    """Return `train.py changed since ck-1929f104 (step 127); --resume ck-1929f104 continues it with the new code`.

    That is the newest run of the same name beside the plan's, if it differs in its code alone, has not succeeded, and
    the plan's own has not begun. Empty: there is none.
    """
    folder = Path(plan.run_folder or "gs://")
    if (plan.run_folder or "gs://").startswith("gs://") or (folder / runfolder.attempt_lock(1)).exists():
        return ""
    for other in run_folders(folder.parent)[:CANDIDATES]:
        before = stored_plan(other / runfolder.PLAN) if is_named(other.name, str(plan.spec.get("name"))) else None
        if before is None or request.differences(request_of(before), request_of(plan)):
            continue
        job = read_job(other)
        return resume_hint(other, files) if job and job.state not in ("SUCCEEDED", "RUNNING") else ""
    return ""


def resume_hint(folder: Path, files: Sequence[File]) -> str:
    """Return which code changed since a run, and the flag that resumes it; empty before its first step."""
    progress = None
    with suppress(OSError, ValueError):
        progress = read_local_progress(folder)
    if progress is None:
        return ""
    written = modification_time(folder / runfolder.PLAN)
    names = [file.name for file in files if file.link is None and modification_time(file.path) > written]
    is_default = folder.parent == Path(RUNS).resolve()
    changed = listed(names, NAMED) if names else "the code"
    return (
        f"{changed} changed since {folder.name} (step {progress.step}); "
        f"--resume {folder.name if is_default else shown(folder)} continues it with the new code"
    )


def modification_time(path: Path) -> float:
    """Return a file's modification time in Unix seconds; 0: unknown."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def check_repeated(plan: Plan, *, is_builtin: bool) -> None:
    """Check a plan that continues the run with its ID, if there is one. Raises UsageError: that run was resumed with
    settings with which the built-in trainer would have computed other steps."""
    folder = plan.run_folder or "gs://"
    if not folder.startswith("gs://"):
        fix = f"--resume {plan.run} with its newest spec continues it; --new starts a fresh run."
        changed_settings(plan.run, stored_plan(Path(folder) / runfolder.PLAN), plan, is_builtin=is_builtin, fix=fix)


def changed_settings(run: str, before: Plan | None, plan: Plan, *, is_builtin: bool, fix: str) -> tuple[str, ...]:
    """Return a line for each setting in which a plan differs from the plan of the run that it resumes.

    Raises UsageError, with `fix`: with these settings the built-in trainer would have computed other steps.
    """
    if before is None:
        return ()
    lines = request.differences(request_of(before), request_of(plan))
    was, now = (one.spec.get("run", {}).get("config", {}) for one in (before, plan))
    if is_builtin and was != now and not is_resumable(was, now):
        text = "\n".join(f"  {line}" for line in lines)
        raise UsageError(f"{run} can't be resumed with these settings (its → this):\n{text}", fix)
    return lines


def request_of(plan: Plan) -> dict[str, Any]:
    return plan.attempts[0].request


def find_local(text: str, *, last: bool) -> Path:
    """Return the folder of the run on this machine with an ID, name or path; with `last`, of several the one that
    started last. Raises UsageError: there is none, or several."""
    runs = (run,) if (run := exact_run(text)) else named_runs(text)
    if not runs and (points := local_points(text)):
        count = plural(len(points.values) or len(points.runs), "point")
        raise UsageError(f"{text} is a sweep of {count}, not a run", f"launch status {text} shows its points.")
    if not runs:
        ids = (folder.name for folder in run_folders(Path(RUNS)))
        fix = similar_names(text, ids) or "launch runs --local lists the runs."
        raise UsageError(f"no run {text} in ./{RUNS}", fix)
    if len(runs) > 1 and not last:
        names = [f"--resume {run.job.handle}" for run in runs[:SHOWN]]
        raise UsageError(f"{len(runs)} runs match {text}", "\n".join([*names, f"--resume {text} --last  # the newest"]))
    return Path(max(runs, key=lambda run: run.job.begun).job.name)
