"""Remove files of launch that no job and no run on this machine needs. Run folders are never removed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from launch_train.host.environment import COMPLETE
from launch_train.host.job import describe_jobs

YOUNG_SECONDS: Final = 3600.0
"""Younger things may belong to a job that is about to start."""


def remove_unneeded(root: Path, trainer: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove unneeded files, or only list them; return the `path` of each below `root`, and its size in `bytes`.

    Kept are: jobs that run, and those whose run folder exists or is in a bucket; their code, version of launch_train
    and environment; the version `trainer`, which asks.
    """
    jobs = describe_jobs(root)
    active = {job["id"] for job in jobs if job["running"]}
    for record in (root / "jobs").glob("*/slurm.json"):  # Slurm's jobs hold no lock here, and have a state at their end
        with suppress(OSError, ValueError):
            active |= set() if "state" in json.loads(record.read_bytes()) else {record.parent.name}
    folders = {job["id"]: str(job["folder"]) for job in jobs}
    kept = [
        job
        for job in jobs
        if job["id"] in active
        or folders[job["id"]].startswith("gs://")  # this machine can't see whether it exists
        or (folders[job["id"]] and Path(folders[job["id"]]).expanduser().is_dir())
    ]
    needed = {
        "jobs": {job["id"] for job in kept},
        "work": active,
        "code": {job["code"] for job in kept},
        "trainer": {trainer, *(job["trainer"] for job in kept)},
        "venvs": environments_of(root, kept),
        "images": {Path(job["container"]["image"]).name for job in kept if job.get("container")},
        "runs-locked": {job["run"] for job in kept},
    }
    removed = []
    for kind, names in needed.items():
        for path in sorted((root / kind).glob("*")):
            is_needed = path.name in names
            is_needed |= kind == "work" and any(path.name.startswith(f"{name}-") for name in names)  # of Slurm's nodes
            with suppress(OSError):  # another process is removing it
                if is_needed or path.suffix in (".lock", ".log") or time.time() - path.lstat().st_mtime < YOUNG_SECONDS:
                    continue
                size = bytes_of(path)
                if dry_run or remove_entry(path):
                    removed.append({"path": f"{kind}/{path.name}", "bytes": size})
    return removed


def environments_of(root: Path, jobs: list[dict[str, Any]]) -> set[str]:
    """Return the IDs of the environments of jobs, with those that these are based on."""
    pending, names = [str(job["python"]) for job in jobs], set[str]()
    while pending:
        venv = Path(pending.pop()).expanduser().parent.parent
        if venv.parent == root / "venvs" and venv.name not in names:
            names.add(venv.name)
            with suppress(OSError, ValueError):
                pending.append(str(json.loads((venv / COMPLETE).read_bytes())["python"]))
    return names


def bytes_of(path: Path) -> int:
    """Return the bytes of a file or of all files in a folder."""
    folders = os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]
    return sum(os.lstat(Path(folder, name)).st_size for folder, _, names in folders for name in names)


def remove_entry(path: Path) -> bool:
    """Remove a file or folder; return False if it is an environment that is being made, or it can't be removed."""
    with suppress(OSError):
        if path.parent.name == "venvs" and path.is_dir():
            with Path(f"{path}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                Path(f"{path}.log").unlink(missing_ok=True)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
        return True
    return False
