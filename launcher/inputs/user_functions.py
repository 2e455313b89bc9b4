"""Check the custom functions that `run.config` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.inputs.python_files import ROOT, file_of_module, near_scripts, parsed
from launcher.spec.checks import custom_functions
from launcher.spec.models import JobSpec
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    import ast


def check_functions(spec: JobSpec, folder: Path, names: Sequence[str], roots: Sequence[str] = ROOT) -> None:
    """Check that the functions' modules are among the code's files, `names`, and define them.

    A missing module is accepted if packages of the image may provide it. Raises UsageError, which suggests similar
    names.
    """
    for field, function in custom_functions(spec.run).items():
        if path := file_of_module(function.partition(":")[0], names, roots):
            _check_name(field, function, folder / path, path)
        elif not (spec.image.requirements or spec.image.is_custom):
            wanted = function.partition(":")[0].replace(".", "/") + ".py"
            raise UsageError(
                f"{field}: {function}: no {wanted} in the code in {folder}",
                did_you_mean(
                    near_scripts(wanted, names), "If a package provides it, add the package to image.requirements."
                ),
                field=field,
            )


def _check_name(field: str, function: str, file: Path, shown: str) -> None:
    """Check that a module binds the name, of any type. Raises UsageError.

    A file that this Python can't parse, or that may bind names dynamically, is not checked.
    """
    import ast  # imported here: a dry run of a spec without custom functions doesn't need it

    name = function.partition(":")[2]
    try:
        tree = parsed(file)
    except (SyntaxError, ValueError, RecursionError, OSError):  # the image's Python may be newer
        return
    everywhere = list(ast.walk(tree))
    if _ANYTHING & {word for node in everywhere for word in _words(node)}:
        return
    bound = {word for node in _module_level(tree) for word in _words(node)}
    bound |= {word for node in everywhere if isinstance(node, ast.Global) for word in node.names}
    if name in bound:
        return
    close = near(name, sorted(word for word in bound if not word.startswith("_")))
    raise UsageError(
        f"{field}: {function}: {shown} has no {name}",
        did_you_mean(close, "The part after the colon must be a function in that file."),
        field=field,
    )


_REFLECTIVE = frozenset({"globals", "locals", "vars", "setattr", "exec", "modules", "__dict__"})
_ANYTHING = _REFLECTIVE | {"*", "__getattr__"}
"""Ways to bind any name: `from x import *`, a module's own __getattr__, sys.modules, and these functions."""


def _module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Walk a module, except the bodies of its functions and classes."""
    import ast

    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, or the member of _ANYTHING that it uses."""
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


def packaged_functions(spec: JobSpec, names: Sequence[str], roots: Sequence[str] = ROOT) -> tuple[str, ...]:
    """Return the functions that only an installed package can provide."""
    functions = custom_functions(spec.run).values()
    return tuple(each for each in functions if not file_of_module(each.partition(":")[0], names, roots))
