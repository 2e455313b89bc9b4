"""Select the files of a user's code folder that go into the image."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from launcher.errors import UsageError
from launcher.images.source_files import File
from launcher.plan.model import Content
from launcher.spec.secret_detection import is_secret_file
from launcher.text import size_text
from launcher.workspace import content, dockerignore
from launcher.workspace.content import unreadable
from launcher.workspace.listing import Listing

LARGEST = 5
"""The number of files that an error about the size names."""


class Code(NamedTuple):
    """The code's files, and the names of files that were left out because they hold secrets."""

    files: list[File]
    secrets: list[str]


def collect_code(folder: Path, without: frozenset[Path] = frozenset()) -> Code:
    """List a folder's code, without run folders, secrets, and files that git or .dockerignore ignore.

    `without` are files and folders in it that are not code: the spec itself and the output folder.

    Raises:
        UsageError: it is not a folder, can't be read, has a nested repository, or a link leads out of it.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises on a name that is too long
        raise UsageError(
            f"image.code: {folder} is not a folder", "The path is relative to the spec file.", field="image.code"
        )
    # An output folder that is the code folder itself excludes nothing.
    left_out = frozenset(path.relative_to(folder).as_posix() for path in without if folder in path.parents)
    found = Code([], [])
    for name, path in Listing(str(folder), dockerignore.read(folder), left_out).files():
        is_link = os.path.islink(path)  # noqa: PTH114 -- 10,000 of them
        if is_secret_file(name, "" if is_link else path):  # a link's target is checked where it is listed itself
            found.secrets.append(name)
        else:
            found.files.append(File(name, Path(path), link(folder, name, path) if is_link else None))
    return found


class CodeCache:
    """Reads each code folder and each file once, for several specs. The files must not change meanwhile."""

    def __init__(self) -> None:
        self._listed = cache(collect_code)
        self._hashed = cache(content.hashed)

    def collect_code(self, folder: Path, without: frozenset[Path] = frozenset()) -> Code:
        """Return what `collect_code` returns; `without` must be files. Raises as it does."""
        left_out = {path.relative_to(folder).as_posix() for path in without if folder in path.parents}
        try:
            found = self._listed(folder)
        except UsageError:  # perhaps because of one of `without`, such as a link that leads out of the folder
            return collect_code(folder, without)
        return Code(
            [file for file in found.files if file.name not in left_out],
            [name for name in found.secrets if name not in left_out],
        )

    def content(self, files: Iterable[File]) -> Content:
        """Return what `content.content` returns. Raises as it does."""
        return content.content(files, self._hashed)


def check_size(files: Iterable[File], limit_mb: int) -> None:
    """Check that the code is not larger than the limit, without reading it.

    Raises:
        UsageError: it is larger; the message names the largest files.
    """
    sizes = sorted(((size_of(file.path), file.name) for file in files), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > limit_mb * 1e6:
        largest = "\n".join(f"  {size_text(size):>12}  {name}" for size, name in sizes[:LARGEST])
        raise UsageError(
            f"the code has {total / 1e6:,.0f} MB, and image.code_limit_mb is {limit_mb}; the largest files:\n{largest}",
            "Exclude other files in .dockerignore (data belongs in the bucket), or raise image.code_limit_mb.",
            field="image.code_limit_mb",
        )


def size_of(path: Path) -> int:
    """Return the size of a file, or of a link itself, in bytes. Raises UsageError: it does not exist any more."""
    try:
        return os.lstat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def link(folder: Path, name: str, path: str) -> str:
    """Return a link's target in the image, relative to the link.

    Raises:
        UsageError: it leads out of the folder, or to itself.
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
    except OSError as error:  # ELOOP is the only error left for a listed path
        raise UsageError(f"{what}, a symlink loop", "Remove it, or exclude it in .dockerignore.") from error
    home = os.path.realpath(folder)
    if Path(home) not in (Path(real), *Path(real).parents):
        raise UsageError(
            f"{what}, outside the code folder; it would be broken in the image",
            "Copy its target, or exclude the link in .dockerignore (data belongs in the bucket).",
        )
    parent = os.path.realpath(Path(path).parent)
    # The target is unchanged unless it names the folder itself (/home/me/code/x, ../code/x), whose name in the image
    # differs.
    leaves = Path(target).is_absolute() or rises(posixpath.join(posixpath.dirname(name), target))
    return os.path.relpath(real, parent).replace(os.sep, "/") if leaves else target


def rises(name: str) -> bool:
    """Return whether a relative path leads above its start."""
    return posixpath.normpath(name).split("/")[0] == ".."
