"""The house's rules that import-linter can't say, as checks of a folder: each answers the places that break it.

They read the source and never import it, so they can be held to a broken copy.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

WORLD = {
    *("os", "sys", "io", "time", "random", "secrets", "uuid", "tempfile", "shutil", "glob", "getpass", "platform"),
    *("socket", "ssl", "http", "urllib", "subprocess", "threading", "multiprocessing", "asyncio", "signal", "logging"),
    *("importlib", "importlib.resources", "pkgutil"),
}
"""What a pure module has no use for: the clock, the environment, files, the network, processes, chance."""

PURE_NAMES = {"pathlib": {"PurePath", "PurePosixPath"}, "datetime": {"timedelta"}, "urllib": set()}
"""Modules of which some names are pure."""

CALLS = {"open", "input", "print", "exec", "eval", "__import__"}

SDKS = {"google", "grpc", "docker", "torch", "numpy", "pydantic", "requests", "tensorboard"}

Found = list[str]


def impure(root: Path, *packages: str) -> Found:
    """Imports and calls by which a pure package (below `root`) would reach the world."""
    return [
        f"{place(root, file, node)}: {what}"
        for file in sources(root, *packages)
        for node in ast.walk(tree(file))
        for what in (*world_imports(node), *world_calls(node))
    ]


def prints(root: Path, package: str, allowed: str) -> Found:
    """Who writes to stdout or stderr in `package` outside `allowed`, a folder below it."""
    outside = (file for file in product(root, package) if not file.is_relative_to(root / package / allowed))
    return [
        f"{place(root, file, node)}: {ast.unparse(node)}"
        for file in outside
        for node in ast.walk(tree(file))
        if speaks(node)
    ]


def eager_sdks(root: Path, package: str) -> Found:
    """Cloud SDKs and torch imported when a module loads, and not where they are used."""
    return [
        f"{place(root, file, node)}: {name}"
        for file in product(root, package)
        for node in on_load(tree(file).body)
        for name in imported(node)
        if name.partition(".")[0] in SDKS
    ]


def imports_of(root: Path, package: str, forbidden: str, allowed: str = "") -> Found:
    """Where `package` imports the package `forbidden`, anywhere in its files; its subpackage `allowed` may be."""
    return [
        f"{place(root, file, node)}: {name}"
        for file in sources(root, package)
        for node in ast.walk(tree(file))
        for name in imported(node)
        if name.partition(".")[0] == forbidden and not (allowed and f"{name}.".startswith(f"{allowed}."))
    ]


def circle(root: Path, package: str) -> Found:
    """Modules of `package` that import each other in a circle, the first one again at its end: at load, in a function,
    or for their types alone."""
    modules = {module_name(root, file): file for file in sources(root, package)}
    arrows = {
        name: {other for node in ast.walk(tree(file)) for other in targets(node, modules)} - {name}
        for name, file in modules.items()
    }
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def targets(node: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Which of the modules an import statement is about: `from train import dist` is about
    launch_train.distributed.process_group."""
    names = imported(node)
    if isinstance(node, ast.ImportFrom) and names:
        inner = [f"{names[0]}.{alias.name}" for alias in node.names]
        names = [name for name in inner if name in modules] or names
    yield from (name for name in names if name in modules)


def module_name(root: Path, file: Path) -> str:
    """train/launch_train/data/__init__.py is launch_train.data."""
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def world_imports(node: ast.AST) -> Iterator[str]:
    """Names imported from modules that reach the world."""
    if isinstance(node, ast.ImportFrom) and node.module in PURE_NAMES:
        names = {alias.name for alias in node.names} - PURE_NAMES[node.module]
        yield from (f"imports {node.module}.{name}" for name in sorted(names))
        return
    for name in imported(node):
        if name in PURE_NAMES or name in WORLD or name.partition(".")[0] in WORLD | SDKS:
            yield f"imports {name}"


def world_calls(node: ast.AST) -> Iterator[str]:
    """Built-in functions that reach the world."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        yield f"calls {node.func.id}()"


def speaks(node: ast.AST) -> bool:
    """print(…), sys.stdout.… and sys.stderr.…, typer.echo and the like."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "print"
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return False
    return (node.value.id, node.attr) in {("sys", "stdout"), ("sys", "stderr"), ("typer", "echo"), ("click", "echo")}


def on_load(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported; `if TYPE_CHECKING:` is none."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from on_load(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from on_load(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names; a relative import names none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def sources(root: Path, *packages: str) -> list[Path]:
    """The Python files of the packages, at least one in each."""
    files = {package: sorted((root / package).rglob("*.py")) for package in packages}
    assert all(files.values()), f"no Python file below one of {packages}"
    return [file for found in files.values() for file in found]


def product(root: Path, package: str) -> list[Path]:
    """The Python files of a package, without its `testing`, which serves tests."""
    return [file for file in sources(root, package) if not file.is_relative_to(root / package / "testing")]


def tree(file: Path) -> ast.Module:
    """The file's syntax tree."""
    return parsed(file.read_text(encoding="utf-8"))


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file and of its copies."""
    return ast.parse(text)


def place(root: Path, file: Path, node: ast.AST) -> str:
    """file:line, the file below the root."""
    return f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"
