"""Rules of the architecture that import-linter and Ruff can't express. Each check returns the places that break it.

The checks read the source and never import it, so tests can run them on a copy with a violation.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

IMPURE_MODULES = {
    *("os", "sys", "io", "time", "random", "secrets", "uuid", "tempfile", "shutil", "glob", "getpass", "platform"),
    *("socket", "ssl", "http", "urllib", "subprocess", "threading", "multiprocessing", "asyncio", "signal", "logging"),
    *("importlib", "importlib.resources", "pkgutil"),
}
"""Modules with side effects or changing results: clock, environment, files, network, processes, random numbers."""

PURE_NAMES = {"pathlib": {"PurePath", "PurePosixPath"}, "datetime": {"timedelta"}, "urllib": set()}
"""Module -> its names that are pure."""

IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}

SDKS = {"google", "grpc", "docker", "torch", "numpy", "pydantic", "requests", "tensorboard"}

Found = list[str]


def impure(root: Path, *packages: str) -> Found:
    """Return the imports and calls in pure packages (below `root`) that have side effects or changing results."""
    return [
        f"{location(root, file, node)}: {what}"
        for file in sources(root, *packages)
        for node in ast.walk(syntax_tree(file))
        for what in (*impure_imports(node), *impure_calls(node))
    ]


def eager_sdks(root: Path, package: str) -> Found:
    """Return where cloud SDKs and torch are imported when a module loads, instead of where they are used."""
    return [
        f"{location(root, file, node)}: {name}"
        for file in product(root, package)
        for node in run_on_import(syntax_tree(file).body)
        for name in imported(node)
        if name.partition(".")[0] in SDKS
    ]


def impure_imports(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement imports from modules with side effects."""
    if isinstance(node, ast.ImportFrom) and node.module in PURE_NAMES:
        names = {alias.name for alias in node.names} - PURE_NAMES[node.module]
        yield from (f"imports {node.module}.{name}" for name in sorted(names))
        return
    for name in imported(node):
        if name in PURE_NAMES or name in IMPURE_MODULES or name.partition(".")[0] in IMPURE_MODULES | SDKS:
            yield f"imports {name}"


def impure_calls(node: ast.AST) -> Iterator[str]:
    """Yield the call of a built-in function with side effects."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
        yield f"calls {node.func.id}()"


def run_on_import(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, without those under `if TYPE_CHECKING:`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from run_on_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from run_on_import(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement names; none for a relative import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def sources(root: Path, *packages: str) -> list[Path]:
    """Return the Python files of the packages, at least one of each."""
    files = {package: sorted((root / package).rglob("*.py")) for package in packages}
    assert all(files.values()), f"no Python file below one of {packages}"
    return [file for found in files.values() for file in found]


def product(root: Path, package: str) -> list[Path]:
    """Return the Python files of a package without its subpackage `testing`, which is for tests."""
    return [file for file in sources(root, package) if not file.is_relative_to(root / package / "testing")]


def syntax_tree(file: Path) -> ast.Module:
    """Return the file's syntax tree."""
    return parsed(file.read_text(encoding="utf-8"))


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file's text; copies of a file share it."""
    return ast.parse(text)


def location(root: Path, file: Path, node: ast.AST) -> str:
    """Return FILE:LINE of a node; the file is relative to the root."""
    return f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"
