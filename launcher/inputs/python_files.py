"""Find, parse and check the Python files that a spec starts, and what they import, of the code and of the image's
packages. Nothing is imported or run."""

from __future__ import annotations

import posixpath
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.inputs.content import data_folder
from launcher.plan.recipe import python_of_tag
from launcher.spec.checks import custom_functions
from launcher.spec.models import JobSpec
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    import ast

    from launcher.images.source_files import UserCode
    from launcher.inputs.interpreter import Interpreter

MOST_FILES, MOST_BYTES = 100, 1_000_000
"""Upper bounds on the code that is read, which keep a dry run instant."""
NEWER = re.compile(r"""\b(type|def|class)\s+\w+\s*[\[=]|\b[rR]?[fFtT][rR]?["']""")
"""Syntax that Python 3.12 accepts and 3.11 rejects: type aliases, type parameters (PEP 695) and f-strings (PEP 701)."""


def parse_file(file: Path) -> ast.Module:
    """Parse a file with this Python's grammar.

    Raises SyntaxError, ValueError (null bytes), RecursionError and OSError.
    """
    return parsed_text(file.read_bytes())


@lru_cache(maxsize=MOST_FILES)
def parsed_text(text: bytes) -> ast.Module:
    """Parse a file's content; the same tree for the same content, so nobody may change it."""
    import ast

    with warnings.catch_warnings(action="ignore"):  # Python itself shows them when the file runs
        return ast.parse(text)


def started(spec: JobSpec, code: UserCode) -> Iterator[tuple[str, str]]:
    """Yield (field, file) for each program and function that the spec names and that is a file of the code."""
    names, roots = code.names, code.roots
    if spec.run.script and spec.run.script.endswith(".py"):
        yield "run.script", posixpath.normpath(spec.run.script)
    if (
        spec.run.module
        and not spec.run.is_builtin
        and (file := file_of_module(spec.run.module, names, roots, "__main__"))
    ):
        yield "run.module", file
    for field, function in custom_functions(spec.run).items():
        if file := file_of_module(function.partition(":")[0], names, roots):
            yield field, file


def file_of_module(module: str, names: Collection[str], roots: Sequence[str] = ("",), first: str = "__init__") -> str:
    """Return the code file of a module, or an empty string. A package (its file `first`) precedes a module."""
    paths = (posixpath.join(root, module.replace(".", "/")) for root in roots)
    return next((file for path in paths for file in (f"{path}/{first}.py", f"{path}.py") if file in names), "")


def walk_code(
    starts: Iterable[str], code: UserCode, imports_of: Callable[[ast.Module], Iterable[ast.AST]]
) -> Iterator[tuple[str, ast.Module]]:
    """Yield the Python files `starts` and, in turn, those that they import, parsed.

    `imports_of` yields the nodes of a file whose imports are followed. A file that can't
    be parsed is left out, and so is everything beyond MOST_FILES or MOST_BYTES.
    """
    known, waiting, size = frozenset(code.names), deque(dict.fromkeys(starts)), 0
    seen, roots = set(waiting), list(dict.fromkeys([*code.roots, *map(posixpath.dirname, waiting)]))
    read = 0
    while waiting and read < MOST_FILES:
        name = waiting.popleft()
        if name not in known or not name.endswith(".py"):
            continue
        read += 1
        try:
            size += code.path(name).stat().st_size
            if size > MOST_BYTES:
                return
            tree = parse_file(code.path(name))
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):  # reported elsewhere
            continue
        yield name, tree
        for module in modules_imported(tree, name, imports_of):
            new = [
                imported_file
                for imported_file in files_imported(module, name, roots, known)
                if imported_file not in seen
            ]
            seen.update(new)
            waiting += new


@lru_cache(maxsize=2 * MOST_FILES)
def modules_imported(
    tree: ast.Module, file: str, imports_of: Callable[[ast.Module], Iterable[ast.AST]]
) -> tuple[str, ...]:
    """Return the modules that the imports among the nodes `imports_of` may load."""
    import ast

    nodes = (node for node in imports_of(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return tuple(dict.fromkeys(module for node in nodes for module in imported(node, file)))


def imported(node: ast.Import | ast.ImportFrom, file: str) -> Iterator[str]:
    """Yield the full names that an import may load. Names relative to `file` begin with a dot."""
    import ast

    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    module = node.module or ""
    if node.level:
        parts = posixpath.dirname(file).split("/")
        parent = parts[: len(parts) - node.level + 1]
        module = "." + ".".join([*filter(None, parent), *filter(None, [module])])
    yield module
    yield from (f"{module}.{alias.name}" for alias in node.names)


def files_imported(module: str, importer: str, roots: Sequence[str], names: frozenset[str]) -> Iterator[str]:
    """Yield the code files that importing a module runs: the module, and the `__init__.py` of its packages.

    They are searched for in `roots` and next to the importing file. A relative name (`.pkg.module`) is searched for in
    the code's root only.
    """
    parts = module.strip(".").split(".")
    for root in [""] if module.startswith(".") else dict.fromkeys([*roots, posixpath.dirname(importer)]):
        above = root.split("/") if root else []
        paths = (".".join([*above, *parts[:end]]) for end in range(1, len(parts) + 1))
        yield from filter(None, (file_of_module(path, names) for path in paths))


def check_module(spec: JobSpec, code: UserCode, python: Interpreter | None) -> tuple[str, ...]:
    """Return a warning if only a package in `image.requirements` can provide `run.module`. `python` runs the job on
    this machine.

    Raises UsageError: neither the code nor the image, or that Python, has it.
    """
    module, image = spec.run.module, spec.image
    if (
        not module
        or spec.run.is_builtin
        or image.is_custom
        or file_of_module(module, code.names, code.roots, "__main__")
    ):
        return ()
    top = module.partition(".")[0]
    if top not in python.lacks if python else top in image_modules() or top in sys.stdlib_module_names:
        return ()
    if image.requirements and not python:
        return (f"run.module: {module} is not in the code: a package of image.requirements must provide it",)
    wanted = module.replace(".", "/") + ".py"
    where = f"in the code in {code.folder}" if code.folder else "next to the spec"
    where += f", and {top} is not installed in {python.path}" if python else ""
    raise UsageError(
        f"run.module: {module}: no {wanted} {where}",
        did_you_mean(near_scripts(wanted, code.names), "Set image.code to the folder with your code."),
        field="run.module",
    )


def near_scripts(name: str, names: Sequence[str]) -> list[str]:
    """Return Python files that may have been meant: the same name in another folder, or a similar name."""
    base = posixpath.basename(name)
    scripts = [file for file in names if file.endswith(".py")]
    return [script for script in scripts if posixpath.basename(script) == base][:3] or near(name, scripts, most=3)


def check_syntax(spec: JobSpec, code: UserCode, base: str, python: Interpreter | None = None) -> tuple[str, ...]:
    """Return a warning for each file that this Python can't parse but a newer one may.

    `base` is the image's base image, which determines the Python version; `python` runs the job on this machine.

    Raises UsageError: no Python that the image may have can parse a file.
    """
    here = ".".join(map(str, sys.version_info[:2]))
    of_image = tuple(map(int, filter(None, python_of_tag(spec.image.base or base).split("."))))
    uncertain = []
    for field, name in started(spec, code):
        try:
            parse_file(code.path(name))
        except SyntaxError as error:
            place = f"{name}:{error.lineno or 1}"
            is_new = error.msg.startswith("f-string") or NEWER.search(error.text or "")
            if of_image and (of_image <= sys.version_info[:2] or (of_image <= (3, 13) and not is_new)):
                raise UsageError(
                    f"{field}: {place}: {error.msg}", "The job could not start: correct this line.", field=field
                ) from error
            what = f"{place}: {error.msg}, says Python {here} here"
            uncertain.append(f"{what}; if the job's Python is no newer, the job can't start")
        except ValueError as error:
            problem = f"{field}: {name} isn't Python: {error}"
            raise UsageError(problem, "Save it as text.", field=field) from error
        except (RecursionError, MemoryError, OSError):  # Python may run what this parser could not handle
            continue
    return () if python and python.version[:2] > sys.version_info[:2] else tuple(dict.fromkeys(uncertain))


# --- Custom functions -------------------------------------------------------------------------------------------------


DYNAMIC = re.compile(r"import\s*\(?\s*\*|\b(__getattr__|__dict__|globals|locals|vars|setattr|exec|modules)\b")
"""Ways to bind any name: `from x import *`, a module's own __getattr__, sys.modules, and these functions."""


def check_functions(spec: JobSpec, code: UserCode) -> None:
    """Check that the functions that `run.config` names are in modules among the code's files.

    A missing module is accepted if packages of the image may provide it. Raises UsageError, which suggests similar
    names.
    """
    for field, function in custom_functions(spec.run).items():
        module, _, name = function.partition(":")
        if path := file_of_module(module, code.names, code.roots):
            bound = names_bound(code.path(path))
            if bound is not None and name not in bound:
                close = near(name, sorted(word for word in bound if not word.startswith("_")))
                raise UsageError(
                    f"{field}: {function}: {path} has no {name}",
                    did_you_mean(close, "The part after the colon must be a function in that file."),
                    field=field,
                )
        elif not (spec.image.requirements or spec.image.is_custom):
            wanted = module.replace(".", "/") + ".py"
            hint = "If a package provides it, add the package to image.requirements."
            raise UsageError(
                f"{field}: {function}: no {wanted} in the code in {code.folder}",
                did_you_mean(near_scripts(wanted, code.names), hint),
                field=field,
            )


def names_bound(file: Path) -> set[str] | None:
    """Return the names that a module binds; None: any, or this Python can't parse it, and the image's may be newer."""
    import symtable
    import tokenize

    try:
        with tokenize.open(file) as source:
            text = source.read()
        if DYNAMIC.search(text):
            return None
        with warnings.catch_warnings(action="ignore"):  # Python itself shows them when the file runs
            top = symtable.symtable(text, str(file), "exec")
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None
    bound = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    waiting = top.get_children()
    while waiting:
        table = waiting.pop()
        waiting += table.get_children()
        symbols = (symbol for symbol in table.get_symbols() if symbol.is_declared_global() and symbol.is_assigned())
        bound.update(symbol.get_name() for symbol in symbols)
    return bound


def packaged_functions(spec: JobSpec, code: UserCode) -> tuple[str, ...]:
    """Return the functions that only an installed package can provide."""
    functions, names = custom_functions(spec.run).values(), code.names
    return tuple(each for each in functions if not file_of_module(each.partition(":")[0], names, code.roots))


# --- Imports ----------------------------------------------------------------------------------------------------------


MOST_WARNINGS = 10


def unprovided(starts: Sequence[str], code: UserCode, python: Interpreter | None = None) -> tuple[str, ...]:
    """Return a warning for each import that neither the code provides nor `python`, which runs the job on this machine;
    without it, nor an image without requirements. `starts` are the files that run."""
    present = sys.stdlib_module_names | image_modules()
    lacks = f"it is not installed in {python.path}" if python else "the image has no package for it"
    lines = [
        f"{place}: imports {module}, and {lacks}"
        for module, place in outside_imports(starts, code).items()
        if (module in python.lacks if python else module not in present)
    ]
    more = len(lines) - MOST_WARNINGS
    return (*lines[:MOST_WARNINGS], *([f"and {more} more unresolved imports"] if more > 0 else []))


def outside_imports(starts: Sequence[str], code: UserCode) -> dict[str, str]:
    """Return FILE:LINE of the first unconditional import of each module that the code doesn't have, by the files that
    run.

    The code's files count in any folder, because a program may add the folder to sys.path.
    """
    places, names = dict[str, str](), code.names
    for file, tree in walk_code(starts, code, unconditional):
        for node in unconditional(tree):
            for name in imported(node, file):
                module = name.partition(".")[0]  # empty: relative to the file
                if module not in ("", "__main__"):
                    places.setdefault(module, f"{file}:{node.lineno}")
    return {
        module: place
        for module, place in places.items()
        if not any(f"/{module}/" in f"/{name}" or f"/{module}." in f"/{name}" for name in names)
    }


def unconditional(block: ast.Module | ast.If | ast.Try) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that a module always runs: of the blocks only in `if __name__ == "__main__":`, and in `try:`
    with only `finally:`."""
    import ast

    for node in block.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif (isinstance(node, ast.If) and "__main__" in ast.dump(node.test)) or (
            isinstance(node, ast.Try) and not node.handlers
        ):
            yield from unconditional(node)


# --- The image's packages ---------------------------------------------------------------------------------------------


OURS = frozenset({"launch_train", "pip"})
"""Modules that every image has besides the locked packages: the trainer, and pip from the base image."""

IMPORTED_AS = {
    "absl-py": "absl",
    "grpcio": "grpc",
    "markdown-it-py": "markdown_it",
    "nvidia-ml-py": "pynvml",
    "googleapis-common-protos": "google",
    "opentelemetry-api": "opentelemetry",
    "pillow": "PIL",
    "proto-plus": "proto",
    "protobuf": "google",
    "pyyaml": "yaml",
    "setuptools": "setuptools pkg_resources",
    "torch": "torch torchgen functorch",
}
"""Locked packages whose modules have other names (the top level of their wheels on PyPI, 2026-11)."""

PYTHON_PROGRAMS = {
    "accelerate": "accelerate",
    "axolotl": "axolotl",
    "colossalai": "colossalai",
    "composer": "mosaicml",
    "deepspeed": "deepspeed",
    "fabric": "lightning",
    "horovodrun": "horovod",
    "lightning": "lightning",
    "litgpt": "litgpt",
    "llamafactory-cli": "llamafactory",
    "ray": "ray",
    "trl": "trl",
    "tune": "torchtune",
    "yolo": "ultralytics",
}
"""Programs that start trainings, which the image lacks, and the packages that have them."""
SYSTEM_PROGRAMS = frozenset({"curl", "g++", "git", "make", "sudo", "wget"})
"""Programs that the recipe's base (python:3.12-slim) lacks, and that no package of pip brings."""


@cache
def image_modules() -> frozenset[str]:
    """Return the top-level modules of the image's locked packages, and those that every image has."""
    locks = [lock.read_text(encoding="utf-8") for lock in data_folder("containers").glob("*.lock")]
    packages = {match[1] for lock in locks for match in re.finditer(r"(?m)^([a-z0-9._-]+)==", lock)}
    return OURS.union(*(modules_of(package) for package in packages))


def modules_of(package: str) -> list[str]:
    """Return the names that a locked package is imported by, and its namespace (google-…)."""
    name = normalised(package)
    if name in IMPORTED_AS:
        return IMPORTED_AS[name].split()
    namespace = name.partition("-")[0]
    return [name.replace("-", "_"), *([namespace] if namespace in ("backports", "google", "nvidia", "cuda") else [])]


def normalised(package: str) -> str:
    """Return a package's name as indexes compare it (packaging.python.org, name normalization)."""
    return re.sub(r"[-_.]+", "-", package).lower()
