"""Find the files of a data path (one file, all files of a folder, or those that match a pattern), and open them."""

from __future__ import annotations

import glob
import gzip
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from launch_train.common.errors import UsageError

PACKED: Final = (".gz", ".zst")
"""Suffixes of compressed files."""

_IS_HELD_OUT: Final = re.compile(r"(^|[^a-z])(val|valid|validation|eval)([^a-z]|$)", re.IGNORECASE)
_IS_TRAINING: Final = re.compile(r"(^|[^a-z])train([^a-z]|$)", re.IGNORECASE)
"""Names of files and folders, such as val.bin, fineweb_val_000000.bin and validation/; train.bin and train-0.arrow."""


class PackedError(UsageError):
    """A compressed file is damaged, truncated or not compressed at all."""


def find_files(data: str) -> list[Path] | None:
    """Return the files of a file, a folder or a glob (*, ?, [a-z], **), sorted by path; None if it does not exist.

    Hidden files and folders (those whose names start with a dot) are skipped.
    """

    def inside(root: Path) -> list[Path]:
        parts = sorted(path.relative_to(root).parts for path in root.rglob("*"))
        visible = (root.joinpath(*part) for part in parts if not any(name.startswith(".") for name in part))
        return [path for path in visible if path.is_file()]

    root = Path(data).expanduser()
    if root.is_file():
        return [root]
    if root.is_dir():
        return inside(root)
    if not glob.has_magic(data):
        return None
    paths = sorted(Path(name) for name in glob.glob(str(root), recursive=True))  # noqa: PTH207 - keeps absolute patterns
    return [file for path in paths for file in (inside(path) if path.is_dir() else [path])] or None


def split_by_name(files: Sequence[Path], data: str) -> tuple[list[Path], list[Path]]:
    """Split the files of a folder or pattern `data` into those to train on and those to hold out, by their names.

    Files that are named neither are for training if no file is named train. A single file is for training.
    """
    root = Path(data).expanduser()
    names = {path: path.relative_to(root).parts if path.is_relative_to(root) else (path.name,) for path in files}
    held_out = [path for path in files if any(map(_IS_HELD_OUT.search, names[path]))]
    others = [path for path in files if path not in set(held_out)]
    if len(files) == 1 or not others:
        return list(files), []
    return [path for path in others if any(map(_IS_TRAINING.search, names[path]))] or others, held_out


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading; .gz and .zst files are decompressed.

    Raises PackedError if that fails, here or while reading, and UsageError if the file can't be read.
    """
    damaged: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    open_packed: Any = gzip.open if path.suffix.lower() == ".gz" else Path.open
    if path.suffix.lower() == ".zst":
        zstd = import_optional(
            "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd",
            ".zst files need the package backports.zstd ({}): pip install backports.zstd, and in the cloud add "
            "backports.zstd to image.requirements",
        )
        open_packed, damaged = zstd.open, (zstd.ZstdError, *damaged)
    try:
        with open_packed(path, "rb") as file:
            yield file
    except damaged as error:
        raise PackedError(f"data: {path} can't be unpacked: {error}") from error
    except OSError as error:
        raise UsageError(f"data: {path} can't be read: {error.strerror or error}") from error


def unpacked_name(path: Path) -> str:
    """Return a file's name in lower case, without the suffix of a compressed one."""
    name = path.name.lower()
    return name.removesuffix(next((suffix for suffix in PACKED if name.endswith(suffix)), ""))


def import_optional(module: str, needed: str) -> Any:
    """Return a module that is not always installed. Raises UsageError, whose text is `needed` with the error in it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"data: {needed.format(error)}") from error
