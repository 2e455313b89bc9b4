"""A user's code: which files of a folder go into the image, and which never do."""

from __future__ import annotations

import codecs
import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from launcher.cli.files import unreadable
from launcher.errors import UsageError
from launcher.sources import File
from launcher.spec.secretive import secret_file
from train import contract

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}
    | {".ruff_cache", ".ipynb_checkpoints", ".DS_Store"}
    | {".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure"}  # keys and tokens
)
"""What is never part of a job's code: folders, and a file that macOS leaves. (`.git` may be a file: a worktree's.)"""

IGNORE_FILES = (".gitignore", ".dockerignore")
LARGEST = 5
"""How many files an error about size names."""


class Code(NamedTuple):
    """The files, and the names of those that were left out because they hold secrets."""

    files: list[File]
    secrets: list[str]


def code(folder: Path, without: frozenset[Path] = frozenset()) -> Code:
    """A folder less its runs, its secrets, and what `.gitignore` and `.dockerignore` at its top leave out.

    `without` are files and folders that may lie in it and are no code: the spec itself, and where runs are written.

    Raises:
        UsageError: it isn't a folder, can't be read, or a link leads out of it.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises on a name that is too long
        raise UsageError(f"image.code: {folder} isn't a folder", "It is relative to the spec's file.")
    ignored = ignore_rules(folder)
    inside = {path for path in without if folder in path.parents}  # runs written right into the folder hide nothing
    found = Code([], [])
    for name, path in walked(str(folder), Ignored(ignored)):
        if (ignored and ignored.match_file(name)) or (inside and among(inside, folder / name)):
            continue
        is_link = os.path.islink(path)  # noqa: PTH114 -- 10,000 of them
        if secret_file(name, "" if is_link else path):  # what a link leads to is looked at in its own place
            found.secrets.append(name)
        else:
            found.files.append(File(name, Path(path), link(folder, name, path) if is_link else None))
    return found


class Ignored:
    """Which folders ignore rules leave out, so that nobody looks into a data set of a million files."""

    def __init__(self, rules: GitIgnoreSpec | None) -> None:
        self._rules = rules
        self._final = rules is not None and not any(one.include is False for one in rules.patterns)

    def wholly(self, folder: str) -> bool:
        """Whether all that lies in it is left out: no rule with `!` can take something in again."""
        return self._final and self.itself(folder)

    def itself(self, folder: str) -> bool:
        """Whether a rule leaves it out."""
        return self._rules is not None and self._rules.match_file(f"{folder}/")


def among(places: Iterable[Path], path: Path) -> bool:
    """Whether the path is one of the places, or lies below one."""
    return not {path, *path.parents}.isdisjoint(places)


def check_size(files: Iterable[File], limit_mb: int) -> None:
    """Refuse code that is larger than the limit, before a byte of it is read.

    Raises:
        UsageError: it is; the largest files are named.
    """
    sizes = sorted(((size_of(file.path), file.name) for file in files), reverse=True)
    total = sum(size for size, _ in sizes)
    if total > limit_mb * 1e6:
        largest = "\n".join(f"  {size / 1e6:9,.1f} MB  {name}" for size, name in sizes[:LARGEST])
        raise UsageError(
            f"the code has {total / 1e6:,.0f} MB, and image.code_limit_mb is {limit_mb}; the largest files:\n{largest}",
            "Name what isn't code in .dockerignore (data belongs in the bucket), or raise image.code_limit_mb.",
        )


def size_of(path: Path) -> int:
    """Bytes of a file, or of a link itself. Raises UsageError: it has gone away."""
    try:
        return os.lstat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


def walked(top: str, ignored: Ignored) -> Iterator[tuple[str, str]]:
    """(name, path) of all files and links below `top`; links to folders are links, and not followed.

    Folders that are never code, and run folders, are left out, as is what is neither file nor link (sockets, pipes).

    Raises:
        UsageError: a folder can't be looked into.
    """
    waiting = [("", top)]
    while waiting:
        below, folder = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name in NEVER:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if not ignored.wholly(below + entry.name) and not is_run_folder(entry.path):
                            waiting.append((f"{below}{entry.name}/", entry.path))
                    elif entry.is_file(follow_symlinks=False) or entry.is_symlink():
                        yield below + entry.name, entry.path
        except OSError as error:
            if not below or not ignored.itself(below.rstrip("/")):
                raise unreadable(error.filename or folder, error) from error


def is_run_folder(folder: str) -> bool:
    """Whether a run was written there: what a rehearsal leaves is never code."""
    plan, lock = os.path.join(folder, contract.PLAN), os.path.join(folder, contract.attempt_lock(1))  # noqa: PTH118 -- one for each folder
    return os.path.isfile(plan) and os.path.isfile(lock)  # noqa: PTH113


def link(folder: Path, name: str, path: str) -> str:
    """Where a link leads, as it will stand in the image: relative to the link.

    Raises:
        UsageError: it leads out of the folder, where the image has something else, or to itself.
    """
    try:
        target = os.readlink(path)  # noqa: PTH115 -- text, as it stands
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
    return os.path.relpath(real, parent) if leaves else target


def rises(name: str) -> bool:
    """Whether a path leads above where it begins."""
    return posixpath.normpath(name).split("/")[0] == ".."


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
