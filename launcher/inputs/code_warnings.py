"""Warn about the user's code and settings if they will probably fail on the job's machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.errors import UsageError
from launcher.images.source_files import UserCode
from launcher.inputs.data_files import Absent, absent_paths
from launcher.inputs.image_modules import PYTHON_PROGRAMS, SYSTEM_PROGRAMS, image_packages, normalised
from launcher.inputs.imports import unprovided
from launcher.inputs.interpreter import Interpreter
from launcher.inputs.markers import fitting_arches, holds_here
from launcher.inputs.python_files import started
from launcher.inputs.requirements import names_and_markers, requirements
from launcher.plan.model import Target
from launcher.plan.torch_build import image_python
from launcher.spec.models import JobSpec
from launcher.spec.reader import Located
from launcher.text import listed


def code_warnings(
    spec: JobSpec,
    located: Located,
    target: Target,
    folder: Path | None,
    beside: Path | None,
    code: UserCode,
    needs: str,
    python: Interpreter | None,
) -> Iterator[str]:
    """Yield the warnings, each with its line. `beside` is the spec's folder, `needs` the text of its requirements,
    `python` runs the job on this machine."""
    names = code.names
    for absent in absent_paths(spec, target, folder, beside, names):
        yield f"{located.place(absent.field)}: {absent.field.rpartition('.')[0]}: {absence(absent)}"
    image, starts = spec.image, [file for _, file in started(spec, names, code.roots)]
    if folder and python:
        yield from unprovided(starts, folder, code, python)
        for function in code.packaged_functions:
            if function.partition(":")[0].partition(".")[0] in python.lacks:
                yield f"{function} is not in the code, and not installed in {python.path}"
        lacking = [
            name
            for name, marker in names_and_markers(needs)
            if python.version and name not in python.installed and holds_here(marker, python.version)
        ]
        if lacking:
            is_file = str(image.requirements).endswith(".txt")
            file = str((beside or Path()) / str(image.requirements))
            fix = python.install(*(["-r", file] if is_file else lacking))
            yield f"image.requirements: not installed in {python.path}: {listed(lacking, 5)}. To install: {fix}"
        return
    program = (spec.run.command or ("",))[0]
    if not image.is_custom and f"bin/{program}" not in code.installed:
        package = PYTHON_PROGRAMS.get(program, "") if not image.requirements else ""
        if package or program in SYSTEM_PROGRAMS:
            fix = f"{package} to image.requirements" if package else f"image.setup: [apt-get install -y {program}]"
            yield f"run.command: the image has no {program}; add {fix}"
    # Of a custom base or setup, and of what the requirements require in turn, nothing is known here.
    if folder and not (image.is_custom or image.requirements):
        yield from unnamed_requirements(folder, image_python(spec))
        yield from unprovided(starts, folder, code)


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


def unnamed_requirements(folder: Path, python: str) -> Iterator[str]:
    """Yield a warning if the code's folder has a requirements file with packages that the image, which has a `python`,
    lacks."""
    for name in ("requirements.txt", "pyproject.toml"):
        if not (folder / name).is_file():
            continue
        try:
            text = requirements(folder / name)
        except UsageError:  # no dependencies, or launch can't read the file
            continue
        lacking = [
            name
            for name, marker in names_and_markers(text)
            if fitting_arches(marker, python) and normalised(name) not in image_packages()
        ]
        if lacking:
            shown = ", ".join(lacking[:5]) + (" …" if len(lacking) > 5 else "")
            yield f"{folder / name} names {shown}, which the image lacks. Set image.requirements: {name} to install it."
            return
