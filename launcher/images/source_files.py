"""An image's files: their paths on this machine and their names in the image."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from launcher.plan.model import EMPTY, Content


class File(NamedTuple):
    """A file and its name in the image, with forward slashes. `link` is the target of a symbolic link."""

    name: str
    path: Path
    link: str | None = None


class Source(Struct, frozen=True):
    """The files of an image."""

    recipe: tuple[File, ...] = ()
    """The Dockerfile and the lock files, by file name."""
    trainer: tuple[File, ...] = ()
    """The package launch_train, as `launch_train/…`."""
    code: tuple[File, ...] = ()
    """The user's files, relative to the code's folder."""
    requirements: str = ""
    """The text of the user's requirements."""
    installed: Mapping[str, str] = {}
    """Files of the installed projects in the code, by name (launcher.inputs.python_project)."""
    digest: str = ""
    """The digest of `code` when the image's tag was computed. The packed files must have the same. Empty: unknown."""
    dockerfile: str = ""
    """The text of a Dockerfile that was made for one spec; `locks` are then its lock files. Empty: the recipe's."""
    base_dockerfile: str = ""
    """The text of the user's Dockerfile, which makes the base. Its context is `code`."""
    locks: tuple[File, ...] = ()
    project: tuple[File, ...] = ()
    """The user's uv.lock and pyproject.toml, or environment.yml."""
    torch: Path | None = None
    """A custom PyTorch wheel, instead of the one that the recipe names."""


class UserCode(Struct, frozen=True):
    """The files of the code's folder, and what a plan says about them."""

    folder: Path | None = None
    """None: the job has no code."""
    files: tuple[File, ...] = ()
    content: Content = EMPTY
    secret_files: tuple[str, ...] = ()
    """Files that hold secrets, and are therefore no part of the code."""
    left_out: tuple[str, ...] = ()
    """Other files that are not part of the code: the spec, its settings file, the output of local runs."""
    roots: tuple[str, ...] = ("",)
    """Folders that modules are imported from, relative to the code's own (empty)."""
    installed: Mapping[str, str] = {}
    """As Source.installed."""
    project_warnings: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names of the files in the image."""
        return [file.name for file in self.files]

    def path(self, name: str) -> Path:
        """Return a file's path on this machine."""
        return (self.folder or Path()) / name


def write_installed(texts: Mapping[str, str], folder: Path) -> tuple[File, ...]:
    """Write the files of Source.installed to a new folder, programs executable, and return them."""
    files = []
    for name, text in sorted(texts.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        path.chmod(0o755 if name.startswith("bin/") else 0o644)
        files.append(File(name, path))
    return tuple(files)


def digest_record(file: File, executable: bool = False, digest: str = "") -> bytes:
    """Return the part of a file that its digest covers.

    For a link these are its name and target. For a file they are its name, the owner's execute bit and the SHA-256 of
    its content. Names are the bytes on the disk.
    """
    name = os.fsencode(file.name)
    if file.link is not None:
        return name + b"\0link\0" + os.fsencode(file.link) + b"\n"
    return name + f"\0{int(executable)}\0{digest}\n".encode()


def digest_of(files: Iterable[bytes]) -> str:
    """Return the SHA-256 over the results of `digest_record`, sorted by name."""
    total = hashlib.sha256()
    for line in sorted(files, key=lambda line: line.partition(b"\0")[0]):
        total.update(line)
    return total.hexdigest()
