"""Files as content: what goes into an image, hashed so that times, owners and order don't matter."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.plan.model import Content

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}
)
"""Folders that are never part of a job's code."""

IGNORE_FILES = (".gitignore", ".dockerignore")


def data_folder(name: str) -> Path:
    """`containers` or `job_specs`: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_data" / name
    return packed if packed.is_dir() else package.parent / name


def trainer_folder() -> Path:
    """Our train package, found beside this one (never a `train` that happens to be on the path)."""
    return Path(__file__).resolve().parent.parent.parent / "train"


def recipe() -> Content:
    """The Dockerfile and our train package: what every image of this version has in it."""
    containers, trainer = data_folder("containers"), trainer_folder()
    return content(
        [
            *((f"containers/{name}", containers / name) for name in listing(containers)),
            *((f"train/{name}", trainer / name) for name in listing(trainer) if name.endswith(".py")),
        ]
    )


def folder(path: Path, without: frozenset[Path] = frozenset()) -> Content:
    """A user's code folder, less what `.gitignore` and `.dockerignore` at its top leave out.

    `without` are files and folders that may lie in it and are no code: the spec itself, and where runs are written.

    Raises:
        UsageError: it isn't a folder.
    """
    if not path.is_dir():
        raise UsageError(f"image.code: {path} isn't a folder", "It is relative to the spec's file.")
    files = ((name, path / name) for name in kept(path))
    return content((name, file) for name, file in files if without.isdisjoint((file, *file.parents)))


def file(path: Path) -> Content:
    """One file, such as a requirements file.

    Raises:
        UsageError: it can't be read.
    """
    if not path.is_file():
        raise UsageError(f"image.requirements: {path} isn't a file", "It is relative to the spec's file.")
    return content([(path.name, path)])


def content(files: Iterable[tuple[str, Path]]) -> Content:
    """SHA-256 over (name, executable, content) of all files, sorted by name."""
    total, size, count = hashlib.sha256(), 0, 0
    for name, path in sorted(files):
        data = path.read_bytes()
        executable = os.access(path, os.X_OK)
        total.update(f"{name}\0{int(executable)}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        size, count = size + len(data), count + 1
    return Content(digest=total.hexdigest(), files=count, size=size)


def kept(path: Path) -> Iterator[str]:
    """Names below `path` that no ignore file leaves out."""
    ignored = ignore_rules(path)
    return (name for name in listing(path) if ignored is None or not ignored.match_file(name))


def ignore_rules(path: Path) -> GitIgnoreSpec | None:
    """The rules of the folder's ignore files, or None when it has none."""
    lines = [
        line for name in IGNORE_FILES if (path / name).is_file() for line in (path / name).read_text().splitlines()
    ]
    if not lines:
        return None
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(lines)


def listing(path: Path) -> Iterator[str]:
    """Names of the files below `path`, with forward slashes; links to folders are not followed."""
    for parent, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name not in NEVER]
        below = Path(parent).relative_to(path)
        yield from ((below / name).as_posix() for name in names if (Path(parent) / name).is_file())
