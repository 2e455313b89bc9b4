"""Find imports in the user's Python files that nothing provides: the image, or the Python of this machine."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from launcher.images.source_files import UserCode
from launcher.inputs.image_modules import image_modules
from launcher.inputs.python_files import imported, walk_code

if TYPE_CHECKING:
    from launcher.inputs.interpreter import Interpreter

MOST_WARNINGS = 10


class Import(NamedTuple):
    """An unconditional import in a file; `module` is the name before the first dot."""

    file: str
    line: int
    module: str


def unprovided(
    starts: Sequence[str], folder: Path, code: UserCode, python: Interpreter | None = None
) -> tuple[str, ...]:
    """Return a warning for each import that neither the code provides nor `python`, which runs the job on this machine;
    without it, nor an image without requirements. `starts` are the files that run."""
    present = sys.stdlib_module_names | image_modules()
    missing = [
        each
        for module, each in outside_imports(starts, folder, code).items()
        if (module in python.lacks if python else module not in present)
    ]
    lacks = f"it is not installed in {python.path}" if python else "the image has no package for it"
    lines = [f"{each.file}:{each.line}: imports {each.module}, and {lacks}" for each in missing[:MOST_WARNINGS]]
    more = len(missing) - MOST_WARNINGS
    return (*lines, *([f"and {more} more unresolved imports"] if more > 0 else []))


def outside_imports(starts: Sequence[str], folder: Path, code: UserCode) -> dict[str, Import]:
    """Return the first import of each module that the code doesn't have, by the files that run.

    The code's files count in any folder, because a program may add the folder to sys.path.
    """
    imports, names = dict[str, Import](), code.names
    for file, tree in walk_code(starts, folder, names, unconditional, code.roots):
        for node in unconditional(tree):
            for name in imported(node, file):
                module = name.partition(".")[0]  # empty: relative to the file
                if module not in ("", "__main__"):
                    imports.setdefault(module, Import(file, node.lineno, module))
    return {
        module: each
        for module, each in imports.items()
        if not any(f"/{module}/" in f"/{name}" or f"/{module}." in f"/{name}" for name in names)
    }


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
