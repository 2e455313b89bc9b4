"""Write an image's files as reproducible archives: layers that are appended to an image, and build contexts.

The bytes depend on names, content and the owner's execute bit only. Times, owners, umask and the order on the disk have
no effect, so two machines produce the same archive from the same files.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import posixpath
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO, RawIOBase
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from launch_train.common import contract
from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File, Source, digest_of, digest_record

TIME = 315_532_800
"""1980-01-01 in Unix seconds, the earliest time in a zip file, and so in a wheel."""
LEVEL = 6
"""gzip's default level. On source code, level 9 takes a third longer and saves one percent."""
DOCKERFILE = "train.Dockerfile"
"""The recipe's Dockerfile."""
BASE_DOCKERFILE = ".launch.base.Dockerfile"
"""The user's own, which makes the base."""

IN_MEMORY = 32_000_000
"""Bytes of a context that are held in memory. A larger one is written to an anonymous temporary file."""


# --- Layers -----------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer on this machine's disk."""

    path: Path
    digest: str
    """`sha256:…` of the compressed bytes, which identifies the layer in a registry."""
    diff_id: str
    """`sha256:…` of the uncompressed tar, which the image's config lists."""
    size: int
    """Compressed size in bytes."""
    made_by: str
    """Shown by `docker history`."""

    def open(self) -> BinaryIO:
        """Open the compressed bytes for reading."""
        return self.path.open("rb")


class HashingWriter:
    """A stream that passes all data on, and computes its digest and length."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        """Pass some bytes on."""
        self._hash.update(data)
        self.size += len(data)
        self._write(data)
        return len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.size

    def flush(self) -> None:
        """Do nothing: no data is buffered."""

    @property
    def digest(self) -> str:
        """Return `sha256:…` of the bytes written so far."""
        return f"sha256:{self._hash.hexdigest()}"


def layer(trees: Sequence[Tree], path: Path, made_by: str) -> Layer:
    """Write the trees to `path` as a layer (OCI image specification, image layout and config). The same files give the
    same bytes, given the same zlib.

    Raises:
        UsageError: a file can't be read.
        LaunchError: the layer can't be written, or the files have changed since they were hashed.
    """
    with path.open("wb", buffering=0) as file:
        packed: Any = HashingWriter(lambda data: write_layer(file, data))
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=packed, mtime=0) as zipped:
            plain: Any = HashingWriter(zipped.write)
            with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for tree in trees:
                    add_tree(tar, tree)
    return Layer(path, packed.digest, plain.digest, packed.size, made_by)


def write_layer(file: RawIOBase, data: bytes) -> None:
    """Write all data. Raises LaunchError, because callers take an OSError for an unreadable source file."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        folder = Path(str(getattr(file, "name", ""))).parent
        raise LaunchError(
            f"a layer can't be written to {folder}: {error.strerror}",
            "Nothing was uploaded. Free space there, or use another folder: TMPDIR=DIR",
        ) from error


# --- Contexts of builds -----------------------------------------------------------------------------------------------


def build_context(source: Source) -> IO[bytes]:
    """Return the context as a tar, positioned at its start. The same files give the same bytes. Closing it removes it.

    At the top are the recipe's files, requirements.txt (empty if the user has none), and the folders launch_train/,
    code/ and torch/, which may be empty.

    Raises UsageError: a file can't be read.
    """

    def write(tar: tarfile.TarFile) -> None:
        own = source.dockerfile
        for file in sorted((*source.locks, *source.project) if own else source.recipe):
            add_file(tar, file, file.name, 0)
        if own:
            add_text(tar, DOCKERFILE, own)
        add_text(tar, "requirements.txt", source.requirements)
        for name, text in sorted(source.installed.items()):
            mode = 0o755 if name.startswith("bin/") else 0o644
            add_text(tar, f"launch_train/{contract.PROJECT_FOLDER}/{name}", text, mode)
        trainer = tuple(file._replace(name=posixpath.relpath(file.name, "launch_train")) for file in source.trainer)
        add_tree(tar, Tree("launch_train", trainer))
        add_tree(tar, Tree("code", source.code, digest=source.digest, group_writes=True))
        add_tree(tar, Tree("torch", (File(source.torch.name, source.torch),) if source.torch else ()))

    return packed_context(write)


def base_context(source: Source) -> IO[bytes]:
    """Return the context of the user's Dockerfile: the code, and the Dockerfile under a separate name. Raises
    UsageError."""

    def write(tar: tarfile.TarFile) -> None:
        for file in sorted(source.code):
            add_file(tar, file, file.name, 0)
        add_text(tar, BASE_DOCKERFILE, source.base_dockerfile)

    return packed_context(write)


def packed_context(write: Callable[[tarfile.TarFile], None]) -> IO[bytes]:
    """Return the tar that `write` fills, positioned at its start."""
    file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 -- the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            write(tar)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


# --- Entries ----------------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """Files below a folder (`opt/launch`), and the uid and gid that own them."""

    folder: str
    files: tuple[File, ...]
    owner: int = 0
    digest: str = ""
    """The files' digest when they were listed (launcher.images.source_files.digest_of); empty if there was none."""
    group_writes: bool = False
    """True if the owner's group may write the files too."""


def add_tree(tar: tarfile.TarFile, tree: Tree) -> None:
    """Write one tree, folders first and sorted by name, with its own folder, which an engine would create as root's.
    Raises UsageError, LaunchError.

    Files that changed after the image's tag was computed must not be pushed: the tag would permanently have other
    content.
    """
    for name in ("", *folders(tree.files)):
        path = posixpath.join(tree.folder, name).rstrip("/")
        tar.addfile(entry(path, tree.owner, tarfile.DIRTYPE, 0o775 if tree.group_writes else 0o755))
    entries = [
        add_file(tar, file, posixpath.join(tree.folder, file.name), tree.owner, group_writes=tree.group_writes)
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


def add_file(tar: tarfile.TarFile, file: File, name: str, owner: int, *, group_writes: bool = False) -> bytes:
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
    info = tarfile.TarInfo(name)
    info.uid = info.gid = owner
    info.type, info.mode, info.mtime = kind, mode, TIME
    return info


def add_text(tar: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    """Write a text as a file."""
    info = entry(name, 0, tarfile.REGTYPE, mode)
    info.size = len(text.encode())
    tar.addfile(info, BytesIO(text.encode()))
