"""Files as a tar whose bytes depend on names, content and the owner's execute bit, and on nothing else.

Not on times, owners, umask or the order on the disk: the same files on two machines give the same archive. Both ways
to an image use it: as the layer that is appended, and as the context that an engine builds from.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import tarfile
from collections.abc import Iterable
from typing import IO, NamedTuple

from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File, counted, digest_of

TIME = 315_532_800
"""1980-01-01, in seconds since 1970: zip, and so a wheel, knows nothing earlier."""


class Tree(NamedTuple):
    """Files below a folder (`opt/launch`), with the number of the user and group that own them."""

    folder: str
    files: tuple[File, ...]
    owner: int = 0
    digest: str = ""
    """The files' digest when they were listed (launcher.images.source_files.digest_of); empty if there was none."""
    group_writes: bool = False
    """True if the owner's group may write the files too."""


def write(trees: Iterable[Tree], to: IO[bytes]) -> None:
    """Write them all, folders first and sorted by name: each tree's own folder (an engine would make it root's
    otherwise), not what stands above it.

    Raises:
        UsageError: a file can't be read.
        LaunchError: the files have changed since they were hashed.
    """
    with tarfile.open(fileobj=to, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for tree in trees:
            put(tar, tree)


def put(tar: tarfile.TarFile, tree: Tree) -> None:
    """One tree. Raises UsageError, LaunchError.

    What changed since its tag was made must not be pushed under it: the tag would be another content's for good.
    """
    for name in ("", *folders(tree.files)):
        path = posixpath.join(tree.folder, name).rstrip("/")
        tar.addfile(entry(path, tree.owner, tarfile.DIRTYPE, 0o775 if tree.group_writes else 0o755))
    found = [
        add(tar, file, posixpath.join(tree.folder, file.name), tree.owner, group_writes=tree.group_writes)
        for file in sorted(tree.files)
    ]
    if tree.digest and digest_of(found) != tree.digest:
        raise LaunchError("the code was changed while its image was made", "No image was made; run the command again.")


def folders(files: Iterable[File]) -> list[str]:
    """All folders that the files lie in, parents first."""
    found: set[str] = set()
    for file in files:
        parent = posixpath.dirname(file.name)
        while parent and parent not in found:
            found.add(parent)
            parent = posixpath.dirname(parent)
    return sorted(found)


def add(tar: tarfile.TarFile, file: File, name: str, owner: int, *, group_writes: bool = False) -> bytes:
    """One file or link; what counts of it. Raises UsageError."""
    if file.link is not None:
        info = entry(name, owner, tarfile.SYMTYPE, 0o777)
        info.linkname = file.link
        tar.addfile(info)
        return counted(file)
    try:
        with file.path.open("rb") as content:
            status = os.fstat(content.fileno())
            executable = bool(status.st_mode & 0o100)
            mode = (0o755 if executable else 0o644) | (0o020 if group_writes else 0)
            info = entry(name, owner, tarfile.REGTYPE, mode)
            info.size = status.st_size
            hashing = Hashing(content)
            tar.addfile(info, hashing)  # type: ignore[arg-type]  # it reads, and nothing else
            return counted(file, executable, hashing.digest())
    except OSError as error:  # tarfile's own "unexpected end of data" is one too
        raise UsageError(f"{file.path} can't be read: {error}", "Nothing has been sent; try again.") from error


class Hashing:
    """A file whose content is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Some bytes."""
        data = self._file.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        """SHA-256 of what was read."""
        return self._hash.hexdigest()


def entry(name: str, owner: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    """What stands before a file's content."""
    info = tarfile.TarInfo(name)
    info.uid = info.gid = owner
    info.type, info.mode, info.mtime = kind, mode, TIME
    return info
