"""List the files of a code folder: as git lists them in a checkout, otherwise by walking the folders."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from launch_train import runfolder
from launcher.errors import UsageError
from launcher.inputs import git
from launcher.inputs.content import unreadable
from launcher.inputs.ignore_rules import DockerIgnore, GitIgnore, ignores

NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}
    | {".ruff_cache", ".ipynb_checkpoints", ".DS_Store"}
    | {".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure"}  # keys and tokens
)
"""Names that are never part of a job's code. In a git worktree, `.git` is a file."""
GITIGNORE = ".gitignore"


class Listing:
    """The code files below the folder `top`, by relative name. `left_out` names files and folders that are not code."""

    def __init__(self, top: str, ignored: DockerIgnore, left_out: frozenset[str]) -> None:
        self._top = top
        self._ignored = ignored
        self._left_out = left_out
        self._ships = cache(self._folder_ships)

    def files(self, below: str = "") -> Iterator[tuple[str, str]]:
        """Yield (name, path) of all files and links below a folder ("" or "…/"). Links are not followed.

        Raises:
            UsageError: a folder can't be read, or it is a repository that can't be included (see `_listed_by_git`).
        """
        listed = git.list_files(self._path(below))
        return self._walked(below) if listed is None else self._listed_by_git(below, listed)

    def _path(self, name: str) -> str:
        return f"{self._top}/{name}".rstrip("/")

    def _is_code(self, name: str) -> bool:
        """Return whether a file or folder may be code, judging by its name."""
        return name.rpartition("/")[2] not in NEVER and name not in self._left_out

    def _folder_ships(self, folder: str) -> bool:
        """Return whether files of the folder may be included."""
        if not folder:
            return True
        if not self._ships(folder.rpartition("/")[0]) or not self._is_code(folder):
            return False
        path = self._path(folder)  # git may still list the former content of a folder that is now a link
        return not (self._ignored.excludes_all_of(folder) or stat.S_ISLNK(mode_of(path)) or is_run_folder(path))

    # --- By git -------------------------------------------------------------------------------------------------------

    def _listed_by_git(self, below: str, listed: git.Listed) -> Iterator[tuple[str, str]]:
        """Yield the files that git lists, and those of submodules.

        Raises UsageError for a submodule that is not checked out and for any other nested repository: git lists only
        its folder, so its code would be missing.
        """
        for name, reason in listed.unread:
            if not (name.endswith("/") and self._ignored.excludes(below + name.rstrip("/"))):
                raise unreadable(self._path(below + name), OSError(0, reason))
        folders = set(parents(listed.names))
        for name in listed.names:
            full = below + name.rstrip("/")
            if not self._ships(full.rpartition("/")[0]) or not self._is_code(full):
                continue
            mode = mode_of(path := self._path(full))
            if stat.S_ISDIR(mode):
                if name not in folders:  # otherwise a file was replaced by a folder
                    yield from self._repository(full, path, is_submodule=not name.endswith("/"))
            elif is_file(mode) and not self._ignored.excludes(full):
                yield full, path

    def _repository(self, name: str, path: str, *, is_submodule: bool) -> Iterator[tuple[str, str]]:
        """Yield the files of a submodule. Raises UsageError: it is not checked out, or is not a submodule."""
        if not self._ships(name):
            return
        if is_submodule and os.path.lexists(f"{path}/.git"):
            yield from self.files(f"{name}/")
        elif not self._ignored.excludes(name):
            raise UsageError(
                f"{name} is a submodule that isn't checked out"
                if is_submodule
                else f"{name} is a nested git repository that is not a submodule",
                (f"git submodule update --init {name}\nor" if is_submodule else "Make it a submodule, or")
                + " name it in .dockerignore if the job doesn't need it.",
            )

    # --- By walking ---------------------------------------------------------------------------------------------------

    def _walked(self, below: str) -> Iterator[tuple[str, str]]:
        """Yield the files without git. Anything but files and links (sockets, pipes) is left out."""
        waiting: list[tuple[str, tuple[GitIgnore, ...]]] = [(below, ())]
        while waiting:
            folder, rules = waiting.pop()
            try:
                with os.scandir(self._path(folder)) as entries:
                    code_entries = [entry for entry in entries if self._is_code(folder + entry.name)]
            except OSError as error:
                if folder == below or not self._ignored.excludes(folder.rstrip("/")):
                    raise unreadable(error.filename or folder, error) from error
                continue
            if any(entry.name == GITIGNORE and entry.is_file(follow_symlinks=False) for entry in code_entries):
                rules = (GitIgnore(folder, Path(self._path(folder + GITIGNORE))), *rules)
            for entry in code_entries:
                name, is_folder = folder + entry.name, entry.is_dir(follow_symlinks=False)
                if not is_folder and not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                    continue
                if ignores(rules, name + "/" * is_folder):
                    continue
                if is_folder and self._ships(name):
                    waiting.append((f"{name}/", rules))
                elif not is_folder and not self._ignored.excludes(name):
                    yield name, entry.path


def parents(names: Iterator[str] | list[str]) -> Iterator[str]:
    """Yield all parent folders of names, some of them repeatedly."""
    for folder in {name.rstrip("/").rpartition("/")[0] for name in names}:
        parts = folder.split("/")
        yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def mode_of(path: str) -> int:
    """Return the mode of a path, or 0 if it does not exist. Links are not followed. Raises UsageError."""
    try:
        return os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError as error:
        raise unreadable(path, error) from error


def is_file(mode: int) -> bool:
    """Return whether the mode is that of a file or a link."""
    return stat.S_ISREG(mode) or stat.S_ISLNK(mode)


def is_run_folder(folder: str) -> bool:
    """Return whether the folder is a run folder of `launch local`, which is never code."""
    plan, lock = os.path.join(folder, runfolder.PLAN), os.path.join(folder, runfolder.attempt_lock(1))  # noqa: PTH118 -- one for each folder
    return os.path.isfile(plan) and os.path.isfile(lock)  # noqa: PTH113 -- Path.is_file raises on a name that is too long
