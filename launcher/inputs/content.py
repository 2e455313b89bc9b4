"""Hash the files that go into an image, independently of times, owners and order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from launch_train.common import contract
from launcher.errors import UsageError
from launcher.images.source_files import File, digest_of, digest_record
from launcher.inputs.price_table import cache_folder
from launcher.plan.model import Content

OTHER_LOCKS = ("node.lock",)
"""Locks that containers/train.Dockerfile does not use."""
Hashed = tuple[bool, str, int]
"""Whether the owner may execute a file, its SHA-256, its size."""
CACHED_FROM = 100
"""Fewest own files whose content is kept in the cache."""
CHUNK = 1 << 18
"""Bytes per read. Smaller files are read in one call."""


def data_folder(name: str) -> Path:
    """Return the folder `containers` or `job_specs`, from the installed package or from the checkout."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "_data" / name
    return packed if packed.is_dir() else package.parent / name


def trainer_folder() -> Path:
    """Return the folder of the package launch_train."""
    return Path(contract.__file__).resolve().parents[1]


@cache
def recipe() -> tuple[File, ...]:
    """Return the Dockerfile and its lock files, by file name."""
    folder = data_folder("containers")
    names = (name for name in names_below(folder) if name.endswith((".Dockerfile", ".lock")))
    return tuple(File(name, folder / name) for name in names if name not in OTHER_LOCKS)


@cache
def locks() -> tuple[File, ...]:
    """Return the package locks that a recipe made for one spec installs from."""
    folder = data_folder("containers")
    names = (name for name in names_below(folder) if name.endswith(".lock") and name != "images.lock")
    return tuple(File(name, folder / name) for name in names)


TRAINER_FILES = (".py", ".csv", ".js", ".css", ".LICENSE")


@cache
def trainer() -> tuple[File, ...]:
    """Return the files of launch_train, as `launch_train/…`."""
    folder = trainer_folder()
    names = (name for name in names_below(folder) if name.endswith(TRAINER_FILES))
    return tuple(File(f"launch_train/{name}", folder / name) for name in names)


@cache
def base_image() -> str:
    """Return the base image: the first row of its lock file (`reference,digest`), with the digest if it is known."""
    rows = (data_folder("containers") / "images.lock").read_text(encoding="utf-8").splitlines()
    reference, _, digest = next(row for row in rows if row and not row.startswith(("#", "reference,"))).partition(",")
    return f"{reference}@{digest}" if digest else reference


def names_below(folder: Path) -> Iterator[str]:
    """Yield the names of all files below one of launch's own folders, with forward slashes on every platform."""
    for entry in os.scandir(folder):
        if not entry.is_dir():
            yield entry.name
        elif entry.name != "__pycache__":
            yield from (f"{entry.name}/{name}" for name in names_below(Path(entry.path)))


def single(field: str, path: Path) -> Content:
    """Return the content of one file that the spec names, such as a wheel.

    Raises UsageError: it is not a file, or can't be read.
    """
    if not os.path.isfile(path):  # noqa: PTH113 -- Path.is_file raises on a name that is too long
        raise UsageError(f"{field}: {path} is not a file", "The path is relative to the spec file.", field=field)
    return content([File(path.name, path)])


def of_text(text: str) -> Content:
    """Return the content of a text, which does not depend on a file name."""
    return Content(digest=hashlib.sha256(text.encode()).hexdigest(), files=1, size=len(text.encode()))


def content(files: Iterable[File], read: Callable[[Path], Hashed] | None = None) -> Content:
    """Return the SHA-256 over (name, executable, content or link target) of all files, sorted by name.

    `read` returns what `hashed` does, for a file that was read before. Names are hashed as the bytes on the disk, which
    need not be UTF-8.

    Raises UsageError: a file can't be read.
    """
    size, digests = 0, []
    for file in files:
        if file.link is not None:
            digests.append(digest_record(file))
        else:
            executable, digest, length = (read or hashed)(file.path)
            digests.append(digest_record(file, executable, digest))
            size += length
    return Content(digest=digest_of(digests), files=len(digests), size=size)


@cache
def content_of_own_files(files: tuple[File, ...]) -> Content:
    """Return the content of launch's own files, read once: they don't change while launch runs.

    Of many files it is kept in the user's cache until the status of one changes (its time of change can't be set):
    reading those of launch_train takes a tenth of a dry run beyond Python's own start.
    """
    folder = cache_folder(os.environ) if len(files) >= CACHED_FROM else None
    if folder is None:
        return content(files)
    stats = ((file.name, os.stat(file.path)) for file in files)  # noqa: PTH116 -- quicker, for hundreds
    facts = [(name, at.st_mode, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns) for name, at in stats]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    cache_file = folder.with_name("own-files")
    with suppress(OSError, ValueError):
        known, size, digest = cache_file.read_text(encoding="utf-8").split()
        if known == key and len(digest) == len(key):
            return Content(digest=digest, files=len(files), size=int(size))
    read = content(files)
    with suppress(OSError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        cache_file.write_text(f"{key} {read.size} {read.digest}", encoding="utf-8")
    return read


def hashed(path: Path, on_chunk: Callable[[bytes], None] = lambda _chunk: None) -> Hashed:
    """Return whether a file's owner may execute it, its SHA-256 and its size. The file is read in chunks.

    Only the owner's execute bit counts. The others depend on the umask of the person who checked the file out.

    Raises UsageError: it can't be read.
    """
    try:
        # Unbuffered: for ten thousand small files, Python's buffers cost more than the hashing.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # Windows would otherwise translate newlines
        try:
            status, digest, size = os.fstat(file), hashlib.sha256(), 0
            room = min(CHUNK, status.st_size + 1)  # a buffer of CHUNK bytes would be mapped for each file
            while chunk := os.read(file, room):
                digest.update(chunk)
                on_chunk(chunk)
                size += len(chunk)
            return bool(status.st_mode & 0o100), digest.hexdigest(), size
        finally:
            os.close(file)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> UsageError:
    """Return the error for a code file that can't be read."""
    return UsageError(
        f"{path} can't be read: {error.strerror}", "It is part of the job's code; name it in .dockerignore if it isn't."
    )
