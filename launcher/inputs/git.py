"""Read a code folder's files and commit from git. Without git the results are empty."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from launcher.errors import UsageError

if TYPE_CHECKING:
    from subprocess import CompletedProcess

SAFE = ("-c", "core.fsmonitor=false", "-c", "core.excludesFile=")
"""A repository's config must not run programs, and the user's global excludes must not change the job's code."""
QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "log.showSignature=false")
WITHOUT_LFS = ("-c", "filter.lfs.smudge=", "-c", "filter.lfs.process=", "-c", "filter.lfs.required=false")
"""Git LFS would fetch the files from a server."""
SUBMODULE = "160000 "
LIST = ("ls-files", "-z", "--cached", "--others", "--exclude-per-directory=.gitignore")
ELSEWHERE = frozenset(
    {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_NAMESPACE"}
    | {"GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES"}
)
"""Variables that point git to another repository. Hooks and `git rebase --exec` set them."""


class Listed(NamedTuple):
    """The output of `git ls-files` for a folder."""

    names: list[str]
    """Files, tracked or not. A submodule is listed as its folder, and any other repository as FOLDER/."""
    unread: list[tuple[str, str]]
    """Folders ("…/") and .gitignore files that git could not read, with the reason."""


class Commit(NamedTuple):
    """The code's commit. `revision` ends with -dirty if files differ from the commit."""

    revision: str
    time: str
    """The commit's time (RFC 3339)."""
    source: str
    """The URL of `origin` without user name or password. Empty if there is none."""


def list_files(folder: str) -> Listed | None:
    """List the files of a checkout below a folder, without those that .gitignore files exclude.

    Return None if git is not installed, the folder is in no checkout, or the checkout ignores it.

    Raises UsageError: git refuses the repository. Without its list, the job's code would differ from other machines'.
    """
    top = checkout_of(os.path.realpath(folder))
    if top is None:
        return None
    # core.worktree may name any folder as the work tree.
    ran = run(folder, *SAFE, f"--work-tree={top}", *LIST)
    if ran is None:
        return None
    said = os.fsdecode(ran.stderr).strip()
    if ran.returncode != 0:
        if "not a git repository" in said:  # a .git file with an invalid target
            return None
        lines = [line.strip() for line in said.splitlines()]
        what = next((line for line in lines if line.startswith("fatal: ")), said).removeprefix("fatal: ")
        fix = [line for line in lines if line.startswith("git ")]
        raise UsageError(
            f"git can't list the code in {folder}: {what}",
            "\n".join(fix) or f"git -C {folder} status",
        )
    names = list(dict.fromkeys(os.fsdecode(ran.stdout).split("\0")[:-1]))  # a conflict lists a file three times
    unread = re.findall(
        r"^warning: (?:could not open directory|unable to access) '([^/].*)': (.+)$", said, re.MULTILINE
    )
    below = os.path.relpath(os.path.realpath(folder), top).replace(os.sep, "/")
    within = [(posixpath.relpath(name, below) + "/" * name.endswith("/"), reason) for name, reason in unread]
    return Listed(names, within) if names or unread else None


def checkout_of(folder: str) -> str | None:
    """Return the root of the folder's checkout: the nearest folder, itself included, that has a .git."""
    places = (Path(folder), *Path(folder).parents)
    return next((str(place) for place in places if os.path.lexists(place / ".git")), None)


def commit(folder: Path, names: Iterable[str] = ()) -> Commit | None:
    """Return the commit that is checked out in a folder, or None. `names` are its files that go into the image."""
    head = git_output(folder, "log", "-1", "--format=%H %cI")
    if not head:
        return None
    revision, _, time = head.partition(" ")
    dirty = "-dirty" if differs(folder, names) else ""
    return Commit(revision + dirty, time, without_user(git_output(folder, "remote", "get-url", "origin")))


def differs(folder: Path, names: Iterable[str]) -> bool:
    """Return whether the code differs from the commit: a tracked file has changed, or one of `names` is not in git."""
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty", "--", ".")
    if git_output(folder, *without_filters(folder), *status):
        return True
    entries = [entry.partition("\t")[::2] for entry in git_output(folder, "ls-files", "--stage", "-z").split("\0")]
    unknown = set(names) - {name for _, name in entries}
    for submodule in (f"{name}/" for facts, name in entries if facts.startswith(SUBMODULE)):
        inside = {name for name in unknown if name.startswith(submodule)}
        if inside and differs(folder / submodule, (name.removeprefix(submodule) for name in inside)):
            return True
        unknown -= inside
    return bool(unknown)


def without_filters(folder: Path) -> Iterator[str]:
    """Yield options that disable the repository's own filters, which `git status` would run."""
    fields = git_output(folder, "config", "--show-scope", "-z", "--name-only", "--get-regexp", r"^filter\.").split("\0")
    for scope, name in zip(fields[::2], fields[1::2], strict=False):
        if scope in {"local", "worktree"}:
            yield from ("-c", f"{name}={'false' if name.endswith('.required') else ''}")


def export_commit(folder: Path, ref: str, to: Path) -> None:
    """Write the files of a commit into the empty folder `to`, as a separate checkout that shares the objects.

    The repository's own files, index and refs do not change. Large files (LFS) are written as pointers.

    Raises UsageError: git is not installed or refuses the repository, or `ref` is not a commit of it.
    """
    remote, _, branch = ref.partition("/")
    fetch = f"git fetch {remote} {branch}" if branch else "git log shows the commits"
    commit = required(
        folder, f"{ref} is not a commit here", fetch, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}"
    )
    objects = git_output(folder, "rev-parse", "--path-format=absolute", "--git-path", "objects")
    form = git_output(folder, "rev-parse", "--show-object-format") or "sha1"
    what = f"git cannot write the files of {ref}"
    required(to, what, "", "init", "--quiet", "--template=", f"--object-format={form}")
    info = to / ".git" / "objects" / "info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_text(f"{objects}\n", encoding="utf-8", newline="\n")
    required(to, what, "", "read-tree", commit)
    required(to, what, "", *WITHOUT_LFS, "checkout-index", "--all", "--quiet")


def required(folder: Path, problem: str, hint: str, *words: str) -> str:
    """Return the output of `git WORDS`. Raises UsageError with git's own message if it fails."""
    ran = run(str(folder), *SAFE, *QUIET, *words)
    if ran is None:
        raise UsageError(f"{problem}: git is not installed", "Install git.")
    if ran.returncode != 0:
        said = os.fsdecode(ran.stderr).strip().removeprefix("fatal: ")
        raise UsageError(f"{problem}: {said}", hint)
    return os.fsdecode(ran.stdout).strip()


def git_output(folder: Path, *words: str) -> str:
    """Return the output of `git WORDS`. Empty if it fails or git is not installed."""
    ran = run(str(folder), *SAFE, *QUIET, *words)
    return os.fsdecode(ran.stdout).strip() if ran and ran.returncode == 0 else ""


def run(folder: str, *words: str) -> CompletedProcess[bytes] | None:
    """Run git in a folder, in English, without fetching or writing. Return None if git is not installed."""
    import subprocess

    kept = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    env = kept | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
    try:
        return subprocess.run(["git", *words], cwd=folder, env=env, capture_output=True, check=False)
    except OSError:
        return None


def without_user(url: str) -> str:
    """Return a URL without the part before @, which may contain a token. `git@host:path` and paths are unchanged."""
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # git also accepts strings that are not URLs
        return ""
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
