"""The user's own functions that `run.config` names: their modules are among the code, or come with a package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.cli.near import near_names
from launcher.errors import UsageError
from launcher.spec.checks import own_functions
from launcher.spec.models import JobSpec


def check_functions(spec: JobSpec, folder: Path, names: Sequence[str]) -> None:
    """Their modules are among the code's files, `names`, unless packages of the image may bring them.

    Raises UsageError, which names what is like a missing one.
    """
    if spec.image.requirements or spec.image.base:
        return
    for field, function in missing(spec, names):
        path = file_of(function)
        near = near_names(path, names)
        raise UsageError(
            f"{field}: {function}: there is no {path} among the code in {folder}",
            f"Did you mean {near}?" if near else "If a package brings it, name that in image.requirements.",
        )


def functions_elsewhere(spec: JobSpec, names: Sequence[str]) -> tuple[str, ...]:
    """Those that only an installed package can bring."""
    return tuple(function for _, function in missing(spec, names))


def missing(spec: JobSpec, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where a function is named, and the function, if its module is no file of the code."""
    for field, function in own_functions(spec.run).items():
        path = file_of(function)
        package = path.removesuffix(".py") + "/__init__.py"
        if path not in names and package not in names:
            yield field, function


def file_of(function: str) -> str:
    """my_pkg/model.py for my_pkg.model:build."""
    return function.partition(":")[0].replace(".", "/") + ".py"
