"""Check, before a job is submitted, that the data files in `run.config` exist where the job runs."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.model import Target
from launcher.spec.checks import data_paths
from launcher.spec.models import JobSpec, Run

ELSEWHERE = ("/gcs", "/mnt", "/workspace", "/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/opt")  # noqa: S108 - compared with texts only; nothing is written there
"""Folders that also exist on the job's machine or in its image."""


def check_data(
    spec: JobSpec, folder: Path | None, names: Sequence[str], target: Target, *, in_place: bool = False
) -> None:
    """Check that relative paths are among the code's files, `names` (with `in_place`: in the code's folder).

    In a rehearsal, absolute paths must exist on this machine. A custom image may contain any file, so nothing is
    checked. Raises UsageError.
    """
    if spec.image.is_custom:
        return
    for field, path in data_paths(spec.run).items():
        is_absolute = path.startswith(("/", "~"))
        if in_place or (is_absolute and target == "local"):
            check_here(field, path, folder)
        elif is_absolute:
            if not is_below(path, mounted_folders(spec, target)):
                problem = f"{field}: {path} does not exist on the job's machine, which has only the code"
                raise UsageError(problem, COPY, field=field)
        else:
            check_taken_along(field, path, folder, names)


def absent_paths(spec: JobSpec, target: Target, folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield (field, problem) for each argument that names a path which the job's machine will lack; none for a
    rehearsal. `folder` is the code's folder."""
    mounted = (*mounted_folders(spec, target), *(["/mnt/localssd"] if target == "vm" else []))
    for field, path in paths(spec.run) if target != "local" else ():
        if not path.startswith(("/", "~/")) or is_below(path, mounted):
            continue
        if ((folder and path.startswith(f"{folder}/")) or not is_below(path, ELSEWHERE)) and is_here(path):
            yield field, f"{path} is a path of this machine; the job's machine does not have it"
        elif is_below(path, MOUNTS):
            _, top, kind, *inside = (*path.split("/"), "NAME")
            if top == "gcs":
                mount = f"{{bucket: {kind}}}"
            else:
                source = "nfs: SERVER:/SHARE" if kind == "nfs" else "lustre: IP@tcp:/NAME"
                mount = f"{{{source}, path: /mnt/{kind}/{inside[0]}}}"
            yield field, f"{path} is not mounted on the job's machine; add it to the spec: mounts: [{mount}]"
        elif not spec.image.is_custom and (path.startswith("~/") or is_below(path, FOREIGN)):
            yield field, f"{path} does not exist on the job's machine; put it in a bucket, or mount it (docs/data.md)"


def paths(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (field, path) for each argument that may be a path, or has one after its equals sign."""
    for field, words in (("run.args", run.args), ("run.command", run.command or ())):
        for index, word in enumerate(words):
            is_path = word.startswith(("/", "~/")) or ("=" not in word and not word.startswith("-"))
            path = word if is_path else word.partition("=")[2]
            if path:
                yield f"{field}.{index}", path


FOREIGN = ("/home", "/Users", "/mnt", "/media", "/data", "/datasets", "/scratch")
"""Folders in which people keep data. The job's machine has them only as mounts."""


MOUNTS = ("/gcs", "/mnt/nfs", "/mnt/lustre")
"""Where Vertex AI mounts buckets and shares."""


def mounted_folders(spec: JobSpec, target: Target) -> tuple[str, ...]:
    """Return the mounts of the job's machine: those that the spec names, and on Vertex AI all buckets."""
    named = tuple(mount.folder for mount in spec.mounts)
    shares = (f"/mnt/{kind}/{mount.mount_point}" for kind in ("nfs", "lustre") for mount in getattr(spec.vertex, kind))
    return ("/gcs", *shares, *named) if target == "vertex" else named


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path is one of the folders or inside one."""
    return any(f"{posixpath.normpath(path)}/".startswith(f"{folder}/") for folder in folders)


def is_here(path: str) -> bool:
    full = os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
    return bool(full.strip("/")) and ("\0" not in full) and os.path.exists(full)  # noqa: PTH110 -- names may be too long


def check_here(field: str, path: str, folder: Path | None) -> None:
    """Check that a path exists on this machine, relative to the code's folder. Raises UsageError."""
    where = (folder or Path.cwd()) / os.path.expanduser(path)  # noqa: PTH111 -- Path's raises for an unknown user
    if not os.path.exists(where) and not glob_matches(path, folder):  # noqa: PTH110 -- names may be too long
        if path.startswith(("/", "~")):
            raise UsageError(f"{field}: {path} does not exist on this machine", field=field)
        relative = "The path is relative to the code folder: image.code, or else the spec's own folder."
        raise UsageError(f"{field}: {path} does not exist in {folder or Path.cwd()}", relative, field=field)


def glob_matches(path: str, folder: Path | None) -> list[str]:
    """Return the files and folders of this machine that match a pattern, relative to the code's folder."""
    if not glob.has_magic(path) or "\0" in path:
        return []
    return glob.glob(os.path.expanduser(path), root_dir=folder, recursive=True)  # noqa: PTH111, PTH207 -- a relative result


COPY = "Copy it into a bucket (gcloud storage cp -r), and name it there: gs://BUCKET/…"


def check_taken_along(field: str, path: str, folder: Path | None, names: Sequence[str]) -> None:
    name = posixpath.normpath(path)
    if name == "." or name in names or any(file.startswith(f"{name}/") for file in names):
        return
    if any(
        match in names or any(file.startswith(f"{match}/") for file in names) for match in glob_matches(name, folder)
    ):
        return
    ignored = folder is not None and not re.match(r"\.\.(/|$)", name) and os.path.exists(folder / name)  # noqa: PTH110 -- names may be too long
    hint = "It exists, but .gitignore, .dockerignore or its folder's name excludes it." if ignored else COPY
    here = "\n`launch local --in-place` runs in that folder itself." if ignored else ""
    raise UsageError(f"{field}: {path} is not in the code in {folder}", hint + here, field=field)
