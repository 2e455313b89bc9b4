"""Write files as a reproducible tar: its bytes depend on names, content and the owner's execute bit only.

Times, owners, umask and the order on the disk have no effect, so two machines produce the same archive from the same
files. It is used for appended layers and for the context of a build.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import tarfile
from collections.abc import Iterable
from typing import IO, NamedTuple

from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File, digest_of, digest_record

TIME = 315_532_800
"""1980-01-01 in Unix seconds, the earliest time in a zip file, and so in a wheel."""


class Tree(NamedTuple):
    """Files below a folder (`opt/launch`), and the uid and gid that own them."""

    folder: str
    files: tuple[File, ...]
    owner: int = 0
    digest: str = ""
    """The files' digest when they were listed (launcher.images.source_files.digest_of); empty if there was none."""
    group_writes: bool = False
    """True if the owner's group may write the files too."""


def write(trees: Iterable[Tree], to: IO[bytes]) -> None:
    """Write all trees, each with folders first and sorted by name.

    Each tree's own folder is included, because an engine would create it with root as the owner. Its parents are not.

    Raises:
        UsageError: a file can't be read.
        LaunchError: the files have changed since they were hashed.
    """
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for tree in trees:
            put(tar, tree)


def put(tar: tarfile.TarFile, tree: Tree) -> None:
    """Write one tree. Raises UsageError, LaunchError.

    Files that changed after the image's tag was computed must not be pushed: the tag would permanently have other
    content.
    """
    for name in ("", *folders(tree.files)):
        path = posixpath.join(tree.folder, name).rstrip("/")
        tar.addfile(entry(path, tree.owner, tarfile.DIRTYPE, 0o775 if tree.group_writes else 0o755))
    entries = [
        add(tar, file, posixpath.join(tree.folder, file.name), tree.owner, group_writes=tree.group_writes)
        for file in sorted(tree.files)
    ]
    if tree.digest and digest_of(entries) != tree.digest:
        raise LaunchError(
            "the code was changed while its image was built", "No image was built; run the command again."
        )


def folders(files: Iterable[File]) -> list[str]:
    """Return all folders that contain the files, parents first."""
    names: set[str] = set()
    for file in files:
        parent = posixpath.dirname(file.name)
        while parent and parent not in names:
            names.add(parent)
            parent = posixpath.dirname(parent)
    return sorted(names)


def add(tar: tarfile.TarFile, file: File, name: str, owner: int, *, group_writes: bool = False) -> bytes:
    """Write one file or link, and return the part that its digest covers. Raises UsageError."""
    if file.link is not None:
        info = entry(name, owner, tarfile.SYMTYPE, 0o777)
        info.linkname = file.link
        tar.addfile(info)
        return digest_record(file)
    try:
        with file.path.open("rb") as content:
            status = os.fstat(content.fileno())
            executable = bool(status.st_mode & 0o100)
            mode = (0o755 if executable else 0o644) | (0o020 if group_writes else 0)
            info = entry(name, owner, tarfile.REGTYPE, mode)
            info.size = status.st_size
            hashing = HashingReader(content)
            tar.addfile(info, hashing)  # type: ignore[arg-type]  # tarfile calls read() only
            return digest_record(file, executable, hashing.digest())
    except OSError as error:  # includes tarfile's own "unexpected end of data"
        raise UsageError(f"{file.path} can't be read: {error}", "Nothing has been sent; try again.") from error


class HashingReader:
    """A file whose content is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """Return the SHA-256 of the bytes read so far."""
        return self._hash.hexdigest()


def entry(name: str, owner: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    """Return the header of an entry."""
    info = tarfile.TarInfo(name)
    info.uid = info.gid = owner
    info.type, info.mode, info.mtime = kind, mode, TIME
    return info
