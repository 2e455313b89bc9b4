"""Check, before a job is submitted, that the data files in `run.config` exist where the job runs."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.model import Target
from launcher.spec.checks import data_paths
from launcher.spec.models import JobSpec, Run

ELSEWHERE = ("/gcs", "/mnt", "/workspace", "/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/opt")  # noqa: S108
"""Folders that also exist on the job's machine or in its image."""


def check_data(
    spec: JobSpec, folder: Path | None, names: Sequence[str], target: Target, *, in_place: bool = False
) -> None:
    """Check that relative paths are among the code's files, `names` (with `in_place`: in the code's folder).

    In a rehearsal, absolute paths must exist on this machine. A custom image may contain any file, so nothing is
    checked. Raises UsageError.
    """
    if spec.image.uri or spec.image.base:
        return
    for field, path in data_paths(spec.run).items():
        is_absolute = path.startswith(("/", "~"))
        if in_place or (is_absolute and target == "local"):
            check_here(field, path, folder)
        elif is_absolute:
            check_mounted(field, path, spec, target)
        else:
            check_taken_along(field, path, folder, names)


def local_paths(run: Run, folder: Path | None, target: Target) -> Iterator[tuple[str, str]]:
    """Yield (field, path) for each argument that names a file or folder of this machine."""
    for field, words in (("run.args", run.args), ("run.command", run.command or ())):
        for index, word in enumerate(words if target != "local" else ()):
            path = word.partition("=")[2] if word.startswith("-") or not word.startswith(("/", "~")) else word
            is_code = folder is not None and path.startswith(f"{folder}/")
            if path.startswith(("/", "~/")) and (is_code or not is_elsewhere(path)) and is_here(path):
                yield f"{field}.{index}", path


def is_elsewhere(path: str) -> bool:
    return any(f"{path}/".startswith(f"{one}/") for one in ELSEWHERE)


def is_here(path: str) -> bool:
    full = os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
    return bool(full.strip("/")) and ("\0" not in full) and os.path.exists(full)  # noqa: PTH110 -- names may be too long


def check_here(field: str, path: str, folder: Path | None) -> None:
    """Check that a path exists on this machine, relative to the code's folder. Raises UsageError."""
    where = (folder or Path.cwd()) / os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
    if not os.path.exists(where):  # noqa: PTH110 -- names may be too long
        if path.startswith(("/", "~")):
            raise UsageError(f"{field}: there is no file or folder {path} on this machine", field=field)
        relative = "It is relative to the folder with the code: image.code, or else the spec's own."
        raise UsageError(f"{field}: there is no file or folder {path} in {folder or Path.cwd()}", relative, field=field)


def check_mounted(field: str, path: str, spec: JobSpec, target: Target) -> None:
    """Check that a path is in a mount of the job's machine. Raises UsageError.

    Vertex AI mounts buckets at /gcs, and the shares that the spec names.
    """
    shares = [f"/mnt/{kind}/{one.mount_point}" for kind in ("nfs", "lustre") for one in getattr(spec.vertex, kind)]
    mounted = ("/gcs", *shares) if target == "vertex" else ()
    if any(posixpath.normpath(path).startswith(f"{one}/") or path == one for one in mounted):
        return
    problem = f"{field}: {path} is no file of the job's machine, which has the code and nothing else"
    raise UsageError(problem, COPY, field=field)


COPY = "Copy it into a bucket (gcloud storage cp -r), and name it there: gs://BUCKET/…"


def check_taken_along(field: str, path: str, folder: Path | None, names: Sequence[str]) -> None:
    name = posixpath.normpath(path)
    if name == "." or name in names or any(one.startswith(f"{name}/") for one in names):
        return
    ignored = folder is not None and not re.match(r"\.\.(/|$)", name) and os.path.exists(folder / name)  # noqa: PTH110 -- names may be too long
    hint = "It is there, but .gitignore, .dockerignore or its folder's name leaves it out." if ignored else COPY
    here = "\n`launch local --in-place` runs in that folder itself." if ignored else ""
    raise UsageError(f"{field}: {path} isn't among the code in {folder}", hint + here, field=field)
