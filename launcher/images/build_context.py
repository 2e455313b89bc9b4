"""Pack an image's files as one archive, for the Docker engine and for Cloud Build."""

from __future__ import annotations

import posixpath
import tarfile
import tempfile
from io import BytesIO
from typing import IO

from launch_train.common import contract
from launcher.images import reproducible_tar
from launcher.images.reproducible_tar import Tree
from launcher.images.source_files import File, Source

DOCKERFILE = "train.Dockerfile"
"""The recipe's Dockerfile."""
BASE_DOCKERFILE = ".launch.base.Dockerfile"
"""The user's own, which makes the base."""

IN_MEMORY = 32_000_000
"""Bytes of a context that are held in memory. A larger one is written to an anonymous temporary file."""


def build_context(source: Source) -> IO[bytes]:
    """Return the context as a tar, positioned at its start. The same files give the same bytes. Closing it removes it.

    At the top are the recipe's files, requirements.txt (empty if the user has none), and the folders launch_train/,
    code/ and torch/, which may be empty.

    Raises:
        UsageError: a file can't be read.
    """
    file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 -- the caller closes it
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            write(tar, source)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def base_context(source: Source) -> IO[bytes]:
    """Return the context of the user's Dockerfile: the code, and the Dockerfile under a separate name. Raises
    UsageError."""
    file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 -- the caller closes it
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in sorted(source.code):
            reproducible_tar.add(tar, member, member.name, 0)
        put_text(tar, BASE_DOCKERFILE, source.base_dockerfile)
    file.seek(0)
    return file


def put_text(tar: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    """Write a text as a file."""
    info = reproducible_tar.entry(name, 0, tarfile.REGTYPE, mode)
    info.size = len(text.encode())
    tar.addfile(info, BytesIO(text.encode()))


def write(tar: tarfile.TarFile, source: Source) -> None:
    """Write all files of the context. Raises UsageError."""
    own = source.dockerfile
    for file in sorted((*source.locks, *source.project) if own else source.recipe):
        reproducible_tar.add(tar, file, file.name, 0)
    for name, text in ((DOCKERFILE, own), ("requirements.txt", source.requirements)):
        if text or name != DOCKERFILE:
            put_text(tar, name, text)
    wheel = (File(source.torch.name, source.torch),) if source.torch else ()
    trainer = tuple(file._replace(name=posixpath.relpath(file.name, "launch_train")) for file in source.trainer)
    for name, text in sorted(source.installed.items()):
        mode = 0o755 if name.startswith("bin/") else 0o644
        put_text(tar, f"launch_train/{contract.PROJECT_FOLDER}/{name}", text, mode)
    for folder, files in (("launch_train", trainer), ("code", source.code), ("torch", wheel)):
        is_code = folder == "code"
        reproducible_tar.put(tar, Tree(folder, files, digest=source.digest if is_code else "", group_writes=is_code))
