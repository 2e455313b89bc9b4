"""The user's own functions that `run.config` names: their modules are among the code, or come with a package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.near import near_names
from launcher.errors import UsageError
from launcher.spec.checks import own_functions
from launcher.spec.models import JobSpec

if TYPE_CHECKING:
    import ast


def check_functions(spec: JobSpec, folder: Path, names: Sequence[str]) -> None:
    """Their modules are among the code's files, `names`, unless packages of the image may bring them, and say their
    names.

    Raises UsageError, which names what is like a missing one.
    """
    for field, function in own_functions(spec.run).items():
        if path := module_of(function, names):
            check_name(field, function, folder / path, path)
        elif not (spec.image.requirements or spec.image.base):
            wanted = file_of(function)
            near = near_names(wanted, names)
            raise UsageError(
                f"{field}: {function}: there is no {wanted} among the code in {folder}",
                f"Did you mean {near}?" if near else "If a package brings it, name that in image.requirements.",
            )


def check_name(field: str, function: str, file: Path, shown: str) -> None:
    """A module binds the name somewhere: what it is, the trainer finds out. Nothing is said of a file that isn't this
    Python's, or that may bind names in ways of its own. Raises UsageError."""
    import ast

    name = function.partition(":")[2]
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):  # the image's Python may be newer
        return
    bound = set(_bound(tree))
    if name in bound or bound & _ANYTHING:
        return
    from difflib import get_close_matches

    public = sorted(one for one in bound if not one.startswith("_"))
    near = get_close_matches(name, public, n=1)
    raise UsageError(
        f"{field}: {function}: {shown} has no {name}",
        f"Did you mean {near[0]}?" if near else "The part behind the colon is a function's name in that file.",
    )


_ANYTHING = frozenset({"*", "globals", "vars", "setattr", "exec", "__getattr__"})
"""What a module may bind any name by: `from x import *`, module-level __getattr__, and these functions."""


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that are bound anywhere in a module, and those of _ANYTHING that it mentions."""
    import ast  # a dry run of a spec without functions of its own doesn't load it

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node.id in _ANYTHING):
            yield node.id


def functions_elsewhere(spec: JobSpec, names: Sequence[str]) -> tuple[str, ...]:
    """Those that only an installed package can bring."""
    return tuple(function for _, function in missing(spec, names))


def missing(spec: JobSpec, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Where a function is named, and the function, if its module is no file of the code."""
    for field, function in own_functions(spec.run).items():
        if not module_of(function, names):
            yield field, function


def module_of(function: str, names: Sequence[str]) -> str:
    """The file of the code that is a function's module; empty if there is none. A package comes before a module."""
    path = file_of(function)
    package = path.removesuffix(".py") + "/__init__.py"
    return next((one for one in (package, path) if one in names), "")


def file_of(function: str) -> str:
    """my_pkg/model.py for my_pkg.model:build."""
    return function.partition(":")[0].replace(".", "/") + ".py"
