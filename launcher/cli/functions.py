"""The user's own functions that `run.config` names: their modules are among the code, or come with a package."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
            _check_name(field, function, folder / path, path)
        elif not (spec.image.requirements or spec.image.base):
            wanted = file_of(function)
            near = near_names(wanted, names)
            raise UsageError(
                f"{field}: {function}: there is no {wanted} among the code in {folder}",
                f"Did you mean {near}?" if near else "If a package brings it, name that in image.requirements.",
                field=field,
            )


def _check_name(field: str, function: str, file: Path, shown: str) -> None:
    """A module binds the name somewhere: what it is, the trainer finds out. Nothing is said of a file that isn't this
    Python's, or that may bind names in ways of its own. Raises UsageError."""
    import ast  # here, as a dry run of a spec without functions of its own doesn't need it

    name = function.partition(":")[2]
    try:
        tree = parsed(file)
    except (SyntaxError, ValueError, RecursionError, OSError):  # the image's Python may be newer
        return
    bound = {word for node in ast.walk(tree) for word in _words(node)}
    if name in bound or bound & _ANYTHING:
        return
    from difflib import get_close_matches

    near = get_close_matches(name, sorted(one for one in bound if not one.startswith("_")), n=1)
    raise UsageError(
        f"{field}: {function}: {shown} has no {name}",
        f"Did you mean {near[0]}?" if near else "The part behind the colon is a function's name in that file.",
        field=field,
    )


def parsed(file: Path) -> ast.Module:
    """Parse a Python file. Raises SyntaxError, ValueError (null bytes), RecursionError and OSError."""
    import ast
    import warnings

    with warnings.catch_warnings(action="ignore"):  # they are its author's, and Python's to tell
        return ast.parse(file.read_bytes())


def unread(spec: JobSpec, folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """FILE:LINE: what is no Python in the script and the modules that a spec names, as this Python has it."""
    script = [spec.run.script] if spec.run.script and spec.run.script.endswith(".py") else []
    modules = [module_of(function, names) for function in own_functions(spec.run).values()]
    return tuple(filter(None, (_unread(folder / name, name) for name in dict.fromkeys([*script, *modules]) if name)))


def _unread(file: Path, name: str) -> str:
    with suppress(ValueError, RecursionError, OSError):
        try:
            parsed(file)
        except SyntaxError as error:
            python = ".".join(map(str, sys.version_info[:2]))
            return f"{name}:{error.lineno or 1}: {error.msg}, says Python {python} here"
    return ""


_REFLECTIVE = frozenset({"globals", "locals", "vars", "setattr", "exec", "modules", "__dict__"})
_ANYTHING = _REFLECTIVE | {"*", "__getattr__"}
"""What a module may bind any name by: `from x import *`, a __getattr__ of its own, sys.modules, and these functions."""


def _words(node: ast.AST) -> Iterator[str]:
    """The name that a part of a module binds, or by which of _ANYTHING it may bind any."""
    import ast

    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=asname):
            yield asname or name.partition(".")[0]
        case ast.Name(id=name, ctx=context):
            if isinstance(context, ast.Store) or name in _REFLECTIVE:
                yield name
        case ast.Attribute(attr=name):
            if name in _REFLECTIVE:
                yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            yield name


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
