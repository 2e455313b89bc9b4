"""Files as content: what goes into an image, hashed so that times, owners and order don't matter."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launcher.errors import UsageError
from launcher.plan.model import Content
from train import contract

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}
)
"""Folders that are never part of a job's code."""

IGNORE_FILES = (".gitignore", ".dockerignore")


class File(NamedTuple):
    """A file and the name that it has in the image, with forward slashes."""

    name: str
    path: Path


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
            *(File(f"containers/{name}", containers / name) for name in listing(containers)),
            *(File(f"train/{name}", trainer / name) for name in listing(trainer) if name.endswith(".py")),
        ]
    )


def code(folder: Path, without: frozenset[Path] = frozenset()) -> list[File]:
    """A user's code: a folder less its runs, and less what `.gitignore` and `.dockerignore` at its top leave out.

    `without` are files and folders that may lie in it and are no code: the spec itself, and where runs are written.

    Raises:
        UsageError: it isn't a folder, or can't be read.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises on a name that is too long
        raise UsageError(f"image.code: {folder} isn't a folder", "It is relative to the spec's file.")
    ignored = ignore_rules(folder)
    names = (name for name in listing(folder) if ignored is None or not ignored.match_file(name))
    files = (File(name, folder / name) for name in names)
    inside = {path for path in without if folder in path.parents}  # runs written right into the folder hide nothing
    return [file for file in files if inside.isdisjoint((file.path, *file.path.parents))]


def requirements(path: Path) -> Content:
    """A requirements file.

    Raises:
        UsageError: it can't be read.
    """
    if not os.path.isfile(path):  # noqa: PTH113 -- as above
        raise UsageError(f"image.requirements: {path} isn't a file", "It is relative to the spec's file.")
    return content([File(path.name, path)])


def content(files: Iterable[File]) -> Content:
    """SHA-256 over (name, executable, content) of all files, sorted by name.

    Names count as the bytes that they are on the disk, which need not be UTF-8.

    Raises:
        UsageError: a file can't be read.
    """
    total, size, count = hashlib.sha256(), 0, 0
    for name, path in sorted((os.fsencode(file.name), file.path) for file in files):
        digest, length = hashed(path)
        executable = os.access(path, os.X_OK)
        total.update(name + f"\0{int(executable)}\0{digest}\n".encode())
        size, count = size + length, count + 1
    return Content(digest=total.hexdigest(), files=count, size=size)


def hashed(path: Path) -> tuple[str, int]:
    """A file's SHA-256 and its size, without holding it in memory. Raises UsageError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> UsageError:
    """The error about code that can't be read."""
    return UsageError(
        f"{path} can't be read: {error.strerror}", "It is part of the job's code; name it in .dockerignore if it isn't."
    )


def ignore_rules(folder: Path) -> GitIgnoreSpec | None:
    """The rules of the folder's ignore files, or None when it has none. Raises UsageError."""
    rules = [rule for name in IGNORE_FILES for rule in ignore_file(folder / name)]
    if not rules:
        return None
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec(rules)


def ignore_file(path: Path) -> Iterator[GitIgnoreSpecPattern]:
    """The rules of one ignore file, in the encoding of this machine's file names.

    Raises:
        UsageError: it can't be read, or a line is no rule.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unreadable(path, error) from error
    from pathspec import GitIgnoreSpec

    for number, line in enumerate(map(os.fsdecode, lines), 1):
        try:
            yield from GitIgnoreSpec.from_lines([line]).patterns
        except (ValueError, re.error):  # pathspec's own error is a ValueError; [z-a] comes from re
            what = f"{path}:{number}: {line!r} is no rule of an ignore file"
            raise UsageError(what, "Remove the line, or put it right.") from None


def listing(path: Path) -> Iterator[str]:
    """Names of the files below `path`, with forward slashes; links to folders are not followed.

    Folders that are never code, and run folders, are left out. Raises UsageError where one can't be looked into.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for parent, folders, names in os.walk(path, onerror=refuse):
        folders[:] = [name for name in folders if name not in NEVER and not is_run_folder(Path(parent, name))]
        below = Path(parent).relative_to(path)
        yield from ((below / name).as_posix() for name in names if (Path(parent) / name).is_file())


def is_run_folder(folder: Path) -> bool:
    """Whether a run was written there: what a rehearsal leaves is never code."""
    return (folder / contract.PLAN).is_file() and (folder / contract.attempt_lock(1)).is_file()
