"""Find imports in the user's Python files that nothing in the image provides."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

from launcher.workspace.image_modules import image_modules, modules_of, normalised
from launcher.workspace.python_files import imported, walk_code

MOST_WARNINGS = 10


class Import(NamedTuple):
    """An unconditional import in a file; `module` is the name before the first dot."""

    file: str
    line: int
    module: str


def unprovided(
    starts: Sequence[str], folder: Path, names: Sequence[str], requirements: Sequence[str]
) -> tuple[str, ...]:
    """Return a warning for each import that neither the code, the image nor a requirement provides.

    `starts` are the files that run. `requirements` are the names of the packages that the spec adds to the image.
    """
    found = dict[str, Import]()
    for one in imports(starts, folder, names):
        if one.module not in found and not is_provided(one.module, names, requirements):
            found[one.module] = one
    lacks = "image.requirements names no package for it" if requirements else "the image has no package for it"
    lines = [f"{one.file}:{one.line}: imports {one.module}, and {lacks}" for one in found.values()]
    more = len(lines) - MOST_WARNINGS
    return (*lines[:MOST_WARNINGS], *([f"and {more} more unresolved imports"] if more > 0 else []))


def imports(starts: Sequence[str], folder: Path, names: Sequence[str]) -> Iterator[Import]:
    """Yield the unconditional imports of files, and of the code files that they import in turn."""
    for name, tree in walk_code(starts, folder, names, unconditional):
        for node in unconditional(tree):
            for module in imported(node, name):
                if module and not module.startswith("."):
                    yield Import(name, node.lineno, module.partition(".")[0])


def unconditional(block: ast.Module | ast.If | ast.Try) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that a module always runs: not in an `if`, and not in a `try` with handlers."""
    for node in block.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_always_run(node):
            yield from unconditional(node)


def is_always_run(node: ast.stmt) -> TypeGuard[ast.If | ast.Try]:
    """Return whether the body always runs: `if __name__ == "__main__":`, and `try:` with only `finally:`."""
    if isinstance(node, ast.If):
        return "__main__" in ast.dump(node.test)
    return isinstance(node, ast.Try) and not node.handlers


def is_provided(module: str, names: Sequence[str], requirements: Sequence[str]) -> bool:
    """Return whether Python, the code, the image or a requirement has a module.

    The code's files count in any folder, because a program may add the folder to sys.path.
    """
    if module in sys.stdlib_module_names or module in image_modules():
        return True
    if any(f"/{module}/" in f"/{name}" or f"/{module}." in f"/{name}" for name in names):
        return True
    return any(may_provide(one, module) for one in requirements) or comes_with(module, requirements)


def may_provide(package: str, module: str) -> bool:
    """Return whether a package may have a module: by the table, or because part of its name equals the module's.

    Examples: hydra-core has hydra, python-dotenv has dotenv, open-clip-torch has open_clip.
    """
    if module in modules_of(package):
        return True
    parts, low = normalised(package).split("-"), module.lower().replace("_", "")
    return any("".join(parts[a:b]) == low for a in range(len(parts)) for b in range(a + 1, len(parts) + 1))


def comes_with(module: str, requirements: Sequence[str]) -> bool:
    """Return whether a requirement, or one that it requires, has a module according to the packages installed here."""
    from importlib.metadata import PackageNotFoundError, packages_distributions, requires

    wanted = {normalised(one) for one in packages_distributions().get(module, ())} if requirements else set()
    waiting, seen = [normalised(one) for one in requirements], set[str]()
    named = set(waiting)  # their extras are unknown here
    while wanted and waiting:
        package = waiting.pop()
        if package in wanted:
            return True
        seen.add(package)
        try:
            needs = [one for one in requires(package) or () if package in named or "extra ==" not in one]
            required = [re.match(r"[\w.-]+", one) for one in needs]
        except PackageNotFoundError:
            continue
        waiting += {normalised(one[0]) for one in required if one} - seen
    return False
