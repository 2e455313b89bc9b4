"""Warn about the user's code and settings if they will probably fail on the job's machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.model import Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import Located
from launcher.workspace.data_files import Absent, absent_paths
from launcher.workspace.python_files import started


def code_warnings(
    spec: JobSpec,
    located: Located,
    target: Target,
    folder: Path | None,
    beside: Path | None,
    names: Sequence[str],
    requirements: str,
) -> Iterator[str]:
    """Yield the warnings, each with its line. `beside` is the spec's folder, `names` are the code's files,
    `requirements` is a file's text."""
    for absent in absent_paths(spec, target, folder, beside, names):
        yield f"{located.place(absent.field)}: {absent.field.rpartition('.')[0]}: {absence(absent)}"
    image = spec.image
    if folder is None or image.uri or image.base or image.dockerfile or (image.requirements and not requirements):
        return  # what the image has is unknown: a base of its own, or packages that uv or conda locks
    from launcher.workspace.imports import unprovided
    from launcher.workspace.requirements import names_of

    if not spec.image.requirements:
        yield from unnamed_requirements(folder)
    added = names_of(requirements)
    if added is not None and (starts := [file for _, file in started(spec, names)]):
        yield from unprovided(starts, folder, names, added)


def absence(absent: Absent) -> str:
    """Return why the job's machine lacks a path, and what to do."""
    path = absent.path
    match absent.why:
        case "here":
            return f"{path} is a path of this machine; the job's machine does not have it"
        case "unmounted":
            return f"{path} is not mounted on the job's machine; {mount_advice(path)}"
        case "foreign":
            return f"{path} does not exist on the job's machine; put it in a bucket, or mount it (docs/data.md)"
        case "beside":
            return f"{path} exists here, but not in the code, where relative paths start; put it there or in a bucket"


def mount_advice(path: str) -> str:
    """Return what to do about a path in a mount that the job's machine does not have."""
    _, top, kind, *rest = (*path.split("/"), "NAME")
    if top == "gcs":
        return f"add it to the spec: mounts: [{{bucket: {kind}}}]"
    source = "nfs: SERVER:/SHARE" if kind == "nfs" else "lustre: IP@tcp:/NAME"
    return f"add it to the spec: mounts: [{{{source}, path: /mnt/{kind}/{rest[0]}}}]"


def unnamed_requirements(folder: Path) -> Iterator[str]:
    """Yield a warning if the code's folder has a requirements file with packages that the image lacks."""
    from launcher.workspace.image_modules import image_modules, modules_of
    from launcher.workspace.requirements import names_of, requirements

    for name in ("requirements.txt", "pyproject.toml"):
        if not (folder / name).is_file():
            continue
        try:
            text = requirements(folder / name)
        except UsageError:  # no dependencies, or launch can't read the file
            continue
        lacking = [one for one in names_of(text) or () if modules_of(one)[0] not in image_modules()]
        if lacking:
            shown = ", ".join(lacking[:5]) + (" …" if len(lacking) > 5 else "")
            yield f"{folder / name} names {shown}, which the image lacks. Set image.requirements: {name} to install it."
            return
