"""Warn about the user's code and settings if they will probably fail on the job's machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.model import Target
from launcher.spec.models import JobSpec
from launcher.spec.reader import Located
from launcher.workspace.data_files import local_paths
from launcher.workspace.python_files import started


def code_warnings(
    spec: JobSpec, located: Located, target: Target, folder: Path | None, names: Sequence[str], requirements: str
) -> Iterator[str]:
    """Yield the warnings, each with its line. `names` are the code's files; `requirements` is a file's text."""
    for field, path in local_paths(spec.run, folder, target):
        where = f"{located.place(field)}: {field.rpartition('.')[0]}"
        yield f"{where}: {path} is a path of this machine; the job's machine does not have it"
    if folder is None or spec.image.uri or spec.image.base:
        return
    from launcher.workspace.imports import unprovided
    from launcher.workspace.requirements import names_of

    if not spec.image.requirements:
        yield from unnamed_requirements(folder)
    added = names_of(requirements)
    if added is not None and (starts := [file for _, file in started(spec, names)]):
        yield from unprovided(starts, folder, names, added)


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
