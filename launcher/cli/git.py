"""What git says about a folder of code; nothing where there is no git."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit


class Commit(NamedTuple):
    """Where the code comes from. `revision` ends with -dirty when files differ from the commit."""

    revision: str
    time: str
    """Of the commit, RFC 3339."""
    source: str
    """The address of `origin`, without a user's name or password; empty when there is none."""


def commit(folder: Path, names: Iterable[str] = ()) -> Commit | None:
    """The commit that a folder is at, or None. `names` are the files of it that go into the image."""
    told = asked(folder, "log", "-1", "--format=%H %cI")
    if not told:
        return None
    revision, _, time = told.partition(" ")
    dirty = "-dirty" if differs(folder, names) else ""
    return Commit(revision + dirty, time, without_user(asked(folder, "remote", "get-url", "origin")))


def differs(folder: Path, names: Iterable[str]) -> bool:
    """Whether the code isn't the commit's: a file of the commit is another one, or one of `names` isn't in git."""
    if asked(folder, "status", "--porcelain", "--untracked-files=no", "--", "."):
        return True
    return not set(names) <= set(asked(folder, "ls-files", "-z").split("\0"))


def asked(folder: Path, *words: str) -> str:
    """What `git WORDS` prints; empty where it fails or isn't there."""
    try:
        ran = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(ran.stdout).strip() if ran.returncode == 0 else ""


def without_user(url: str) -> str:
    """An address without what stands before @ in it: that may be a token. `git@host:path` and paths stay."""
    if "://" not in url:
        return url
    try:
        parts = urlsplit(url)
    except ValueError:  # git takes what is no address as well
        return ""
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
