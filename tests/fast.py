"""The test files for `make test-fast`: those that load no heavy library and start no process, as their imports say.

python -m tests.fast prints them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("launcher", "tests", "launch_train", "benchmarks")
HEAVY = frozenset({"cryptography", "docker", "google", "grpc", "hypothesis", "numpy", "torch", "transformers"})
"""What takes a second or more to import."""
STARTS = frozenset({"multiprocessing", "subprocess"})
"""What a test starts processes with, by itself or by a module of tests."""


def files() -> list[Path]:
    """All fast test files."""
    return [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if is_fast(path)]


def is_fast(path: Path) -> bool:
    """Whether neither the file nor a conftest.py above it imports anything slow, directly or by modules of ours."""
    folders = [folder for folder in path.parents if ROOT / "tests" in folder.parents]
    conftests = [file for folder in folders if (file := folder / "conftest.py").exists()]
    seen = set[Path]()
    return not any(_slow(file, seen) for file in (path, *conftests))


def _slow(path: Path, seen: set[Path]) -> bool:
    if path in seen:
        return False
    seen.add(path)
    ours, others = _imported(path)
    starts = ROOT / "tests" in path.parents and path.name != "conftest.py"  # whose fixtures not every test asks for
    slow = HEAVY | STARTS if starts else HEAVY
    return not slow.isdisjoint(others) or any(_slow(file, seen) for file in ours)


@functools.cache
def _imported(path: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """The files of ours that a file imports, and the packages of others. Of files of ours only what is imported with
    the module counts; of a test file also what its functions import."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names = set(_names(body, inside=path.name.startswith("test_")))
    ours = {file for name in names if name.partition(".")[0] in OURS for file in _files(name)}
    return frozenset(ours), frozenset(name.partition(".")[0] for name in names)


def _names(body: list[ast.stmt], *, inside: bool) -> Iterator[str]:
    """Dotted names that statements import. What only a type checker sees is left out."""
    for node in body:
        match node:
            case ast.Import(names=names):
                yield from (one.name for one in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{one.name}" for one in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.FunctionDef() if not inside:
                continue
            case _:
                for part in ("body", "orelse", "handlers", "finalbody"):
                    yield from _names(getattr(node, part, []), inside=inside)


def _files(name: str) -> Iterator[Path]:
    """The files that `import name` runs; the last part may be a name in a module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        at = (ROOT / "train" if parts[0] == "launch_train" else ROOT).joinpath(*parts[:end])
        yield from (file for file in (at / "__init__.py", at.with_suffix(".py")) if file.exists())


if __name__ == "__main__":
    print(*(path.relative_to(ROOT) for path in files()), sep="\n")
