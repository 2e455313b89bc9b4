"""A user's code: which files of a folder go into the image, and which never do."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UsageError
from launcher.images.source_files import File
from launcher.spec.secretive import secret_file
from launcher.text import size_text
from launcher.workspace import dockerignore
from launcher.workspace.content import unreadable
from launcher.workspace.listing import Listing

LARGEST = 5
"""How many files an error about size names."""


class Code(NamedTuple):
    """The files, and the names of those that were left out because they hold secrets."""

    files: list[File]
    secrets: list[str]


def code(folder: Path, without: frozenset[Path] = frozenset()) -> Code:
    """List a folder's code, less its runs, its secrets, and what git and .dockerignore ignore.

    `without` are files and folders that may lie in it and are no code: the spec itself, and where runs are written.

    Raises:
        UsageError: it isn't a folder, can't be read, has a repository that doesn't ship, or a link leads out of it.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises on a name that is too long
        raise UsageError(
            f"image.code: {folder} isn't a folder", "It is relative to the spec's file.", field="image.code"
        )
    # Runs that are written right into the folder hide nothing.
    left_out = frozenset(path.relative_to(folder).as_posix() for path in without if folder in path.parents)
    found = Code([], [])
    for name, path in Listing(str(folder), dockerignore.read(folder), left_out).files():
        is_link = os.path.islink(path)  # noqa: PTH114 -- 10,000 of them
        if secret_file(name, "" if is_link else path):  # what a link leads to is looked at in its own place
            found.secrets.append(name)
        else:
            found.files.append(File(name, Path(path), link(folder, name, path) if is_link else None))
    return found


def check_size(files: Iterable[File], limit_mb: int) -> None:
    """Refuse code that is larger than the limit, before a byte of it is read.

    Raises:
        UsageError: it is; the largest files are named.
    """
    sizes = sorted(((size_of(file.path), file.name) for file in files), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > limit_mb * 1e6:
        largest = "\n".join(f"  {size_text(size):>12}  {name}" for size, name in sizes[:LARGEST])
        raise UsageError(
            f"the code has {total / 1e6:,.0f} MB, and image.code_limit_mb is {limit_mb}; the largest files:\n{largest}",
            "Name what isn't code in .dockerignore (data belongs in the bucket), or raise image.code_limit_mb.",
            field="image.code_limit_mb",
        )


def size_of(path: Path) -> int:
    """Bytes of a file, or of a link itself. Raises UsageError: it has gone away."""
    try:
        return os.lstat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def link(folder: Path, name: str, path: str) -> str:
    """Where a link leads, as it will stand in the image: relative to the link.

    Raises:
        UsageError: it leads out of the folder, where the image has something else, or to itself.
    """
    try:
        target = os.readlink(path).replace(os.sep, "/")  # noqa: PTH115 -- Path.readlink normalises the target
    except OSError as error:
        raise unreadable(path, error) from error
    what = f"{name} is a link to {target}"
    try:
        real = os.path.realpath(path, strict=True)
    except FileNotFoundError:
        real = os.path.realpath(path)
    except OSError as error:  # ELOOP: realpath has no other way to fail on what can be listed
        raise UsageError(f"{what}, which leads in a circle", "Remove it, or name it in .dockerignore.") from error
    home = os.path.realpath(folder)
    if Path(home) not in (Path(real), *Path(real).parents):
        raise UsageError(
            f"{what}, outside the code's folder: it would lead nowhere in the image",
            "Copy what it leads to, or name it in .dockerignore (data belongs in the bucket).",
        )
    parent = os.path.realpath(os.path.dirname(path))  # noqa: PTH120
    # As it stands, unless it names the folder itself (/home/me/code/x, ../code/x), which has another name in the image.
    leaves = os.path.isabs(target) or rises(posixpath.join(posixpath.dirname(name), target))  # noqa: PTH117
    return os.path.relpath(real, parent).replace(os.sep, "/") if leaves else target


def rises(name: str) -> bool:
    """Whether a path leads above where it begins."""
    return posixpath.normpath(name).split("/")[0] == ".."
