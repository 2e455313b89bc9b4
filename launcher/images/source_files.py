"""An image's files: their paths on this machine and their names in the image."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class File(NamedTuple):
    """A file and the name that it has in the image, with forward slashes; `link` is the target of a symbolic link."""

    name: str
    path: Path
    link: str | None = None


class Source(NamedTuple):
    """The files of an image."""

    recipe: tuple[File, ...] = ()
    """The Dockerfile and the locks, each by its own name."""
    trainer: tuple[File, ...] = ()
    """The package launch_train, as `launch_train/…`."""
    code: tuple[File, ...] = ()
    """The user's, relative to its folder."""
    requirements: str = ""
    """The text of the user's requirements."""
    digest: str = ""
    """Of `code` as it was when the image's tag was made of it: what is packed must be the same. Empty: not known."""
    torch: Path | None = None
    """A PyTorch wheel of the user's own in place of the one that the recipe names."""


def counted(file: File, executable: bool = False, digest: str = "") -> bytes:
    """What counts of a file: its name as the bytes that it is on the disk, and the link's target, or whether its owner
    may execute it and the SHA-256 of its content."""
    name = os.fsencode(file.name)
    if file.link is not None:
        return name + b"\0link\0" + os.fsencode(file.link) + b"\n"
    return name + f"\0{int(executable)}\0{digest}\n".encode()


def digest_of(files: Iterable[bytes]) -> str:
    """SHA-256 over what counts of each file, sorted by name."""
    total = hashlib.sha256()
    for one in sorted(files, key=lambda one: one.partition(b"\0")[0]):
        total.update(one)
    return total.hexdigest()
