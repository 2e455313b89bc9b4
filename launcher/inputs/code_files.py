"""Select the files of a user's code folder that go into the image, as git lists them or, without git, by walking it."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from launch_train import runfolder
from launcher.errors import UsageError
from launcher.images.source_files import File
from launcher.inputs import content, git, ignore_rules
from launcher.inputs.content import Hashed, unreadable
from launcher.inputs.ignore_rules import DockerIgnore, GitIgnore, ignores
from launcher.inputs.secret_files import Secret, SecretSearch, has_secret_name
from launcher.plan.model import Content
from launcher.text import size_text

LARGEST = 5
"""The number of files that an error about the size names."""
NEVER = frozenset(
    {".git", ".hg", ".svn", "__pycache__", ".venv", "venv", "node_modules", ".mypy_cache", ".pytest_cache"}
    | {".ruff_cache", ".ipynb_checkpoints", ".DS_Store"}
    | {".ssh", ".aws", ".gnupg", ".kube", ".docker", ".azure"}  # keys and tokens
)
"""Names that are never part of a job's code. In a git worktree, `.git` is a file."""
GITIGNORE = ".gitignore"
MOST_NAMED = 10
"""The number of files with secrets that an error names."""


class Code(NamedTuple):
    """The files that are sent, their content, and the names of files that were left out because they hold secrets."""

    files: list[File]
    content: Content
    secrets: list[str]


def collect_code(folder: Path, without: frozenset[Path] = frozenset()) -> list[File]:
    """List a folder's code, without run folders and files that git or .dockerignore ignore.

    `without` are files and folders in it that are not code: the spec itself and the output folder.

    Raises UsageError: it is not a folder, can't be read, has a nested repository, or a link leads out of it.
    """
    if not os.path.isdir(folder):  # noqa: PTH112 -- Path.is_dir raises on a name that is too long
        raise UsageError(
            f"image.code: {folder} is not a folder", "The path is relative to the spec file.", field="image.code"
        )
    # An output folder that is the code folder itself excludes nothing.
    left_out = frozenset(path.relative_to(folder).as_posix() for path in without if folder in path.parents)
    listing = Listing(str(folder), ignore_rules.read_dockerignore(folder), left_out)
    return [
        File(name, Path(path), link_target(folder, name, path) if os.path.islink(path) else None)  # noqa: PTH114 -- 10,000
        for name, path in listing.files()
    ]


def hashed_and_searched(path: Path) -> tuple[Hashed, Secret | None]:
    """Return what `hashed` does, and the file's first secret. Raises UsageError."""
    search = SecretSearch()
    return content.hashed(path, search.feed), search.secret


def without_secrets(
    files: Sequence[File],
    allowed: Sequence[str] = (),
    read: Callable[[Path], tuple[Hashed, Secret | None]] = hashed_and_searched,
    *,
    override: str = "image.allow_secrets",
) -> Code:
    """Hash code and leave out files that hold secrets: each is read once. A link's target is judged where it is listed.

    `allowed` are patterns of names that are sent whatever they hold; `override` is the setting or flag for them.

    Raises UsageError: a file can't be read, or a program or its settings contain a secret. The job may need such a
    file, so it is not left out.
    """
    kept, left_out, exposed = list[File](), list[str](), list[str]()
    hashes = dict[Path, Hashed]()
    for file in files:
        secret = None
        is_allowed = any(pattern == file.name or fnmatchcase(file.name, pattern) for pattern in allowed)
        is_named = has_secret_name(file.name) and not is_allowed
        if file.link is None and not is_named:
            hashes[file.path], secret = read(file.path)
        if is_named or (secret and not secret.line and not is_allowed):
            left_out.append(file.name)
            continue
        if secret and not is_allowed:
            exposed.append(f"{file.name if file.name.isprintable() else repr(file.name)}:{secret.line}: {secret.kind}")
        kept.append(file)
    if exposed:
        more = f"\n  and {len(exposed) - MOST_NAMED} more files" if len(exposed) > MOST_NAMED else ""
        lines = "".join(f"\n  {line}" for line in exposed[:MOST_NAMED])
        raise UsageError(
            f"the code contains secrets, and everybody who can read its copy could use them:{lines}{more}",
            "Pass a secret to the job with `secrets` (docs/spec.md#secrets), or exclude the file in .dockerignore.\n"
            f"If it is no secret, allow the file with {override}, or the line with a comment: gitleaks:allow",
        )
    return Code(kept, content.content(kept, hashes.__getitem__), left_out)


class CodeCache:
    """Reads each code folder and each file once, for several specs. The files must not change meanwhile."""

    def __init__(self) -> None:
        self._listed = cache(collect_code)
        self.read = cache(hashed_and_searched)

    def collect_code(self, folder: Path, without: frozenset[Path] = frozenset()) -> list[File]:
        """Return what `collect_code` returns; `without` must be files. Raises as it does."""
        left_out = {path.relative_to(folder).as_posix() for path in without if folder in path.parents}
        try:
            files = self._listed(folder)
        except UsageError:  # perhaps because of one of `without`, such as a link that leads out of the folder
            return collect_code(folder, without)
        return [file for file in files if file.name not in left_out]


def check_size(files: Iterable[File], limit_mb: int) -> None:
    """Check that the code is not larger than the limit, without reading it.

    Raises UsageError: it is larger; the message names the largest files.
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


def link_target(folder: Path, name: str, path: str) -> str:
    """Return a link's target in the image, relative to the link.

    Raises UsageError: it leads out of the folder, or to itself.
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
    from_top = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
    leaves = Path(target).is_absolute() or from_top.split("/")[0] == ".."
    return os.path.relpath(real, parent).replace(os.sep, "/") if leaves else target


# --- The list of files ------------------------------------------------------------------------------------------------


class Listing:
    """The code files below the folder `top`, by relative name. `left_out` names files and folders that are not code."""

    def __init__(self, top: str, ignored: DockerIgnore, left_out: frozenset[str]) -> None:
        self._top = top
        self._ignored = ignored
        self._left_out = left_out
        self._ships = cache(self._folder_ships)

    def files(self, below: str = "") -> Iterator[tuple[str, str]]:
        """Yield (name, path) of all files and links below a folder ("" or "…/"). Links are not followed.

        Raises UsageError: a folder can't be read, or it is a repository that can't be included (see `_listed_by_git`).
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
            elif (stat.S_ISREG(mode) or stat.S_ISLNK(mode)) and not self._ignored.excludes(full):
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


def is_run_folder(folder: str) -> bool:
    """Return whether the folder is a run folder of `launch local`, which is never code."""
    plan, lock = os.path.join(folder, runfolder.PLAN), os.path.join(folder, runfolder.attempt_lock(1))  # noqa: PTH118 -- one for each folder
    return os.path.isfile(plan) and os.path.isfile(lock)  # noqa: PTH113 -- Path.is_file raises on a name that is too long
