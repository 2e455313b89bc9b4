"""Run client commands in this process as Windows would: without what the standard library lacks there.

`main` reads {"lines": [[ARGV, ...], ...], "env": {...}} and prints [[exit code, stdout, stderr], ...]. typeshed, which
mypy brings along, says what is missing. Paths and newlines stay those of this machine.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mypy

MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
"""Modules whose documentation says "Availability: Unix"."""
SHRUNK = ("os", "signal", "socket", "time")
"""Modules that exist on Windows with fewer names."""


def main() -> None:
    """Run the commands of stdin."""
    from tests.command import launch

    asked = json.load(sys.stdin)
    importlib.import_module("typer.main")  # the standard library and Typer know Windows; they load what is here
    for module in ("getpass", "shutil", "subprocess", "tempfile"):
        importlib.import_module(module)
    mask()
    json.dump([launch(*line, env=asked["env"]) for line in asked["lines"]], sys.stdout)


def mask() -> None:
    """Remove the modules and names that Windows lacks."""
    for module in MODULES:
        sys.modules[module] = None  # type: ignore[assignment]  # its import fails, as for one that does not exist
    for module in SHRUNK:
        found = importlib.import_module(module)
        for name in missing(module) & vars(found).keys():
            delattr(found, name)


def missing(module: str) -> set[str]:
    """Return the names that typeshed declares for other platforms than Windows only."""
    folder = Path(mypy.__file__).parent / "typeshed" / "stdlib"
    stub = next(path for path in (folder / f"{module}.pyi", folder / module / "__init__.pyi") if path.exists())
    body = ast.parse(stub.read_text(encoding="utf-8")).body
    return set(declared(body, windows=False)) - set(declared(body, windows=True))


def declared(body: list[ast.stmt], *, windows: bool) -> Iterator[str]:
    """Yield the names that statements bind on Windows, or else on Linux."""
    for node in body:
        match node:
            case ast.If(test=ast.Compare(left=ast.Attribute(attr="platform"), ops=[op], comparators=[value])):
                platform = "win32" if windows else "linux"
                equal = isinstance(value, ast.Constant) and value.value == platform
                yield from declared(node.body if equal is isinstance(op, ast.Eq) else node.orelse, windows=windows)
            case ast.If():
                yield from declared([*node.body, *node.orelse], windows=windows)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.ImportFrom(names=names):
                yield from (one.asname or one.name for one in names)
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name
