"""A local folder as a Storage."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from launch_train.common.errors import OutputError
from launch_train.common.storage.names import Buffer, as_bytes, check_object_name

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

HIDDEN = ".tmp-"
"""Prefix of files that are not objects of the folder."""

LOCK = f"{HIDDEN}lock"
"""The lock file of `swap`."""

BLOCK = 1 << 20


class ForeignFileError(OutputError):
    """A name of the folder is no file of it: a link, a pipe or a device."""


class LocalFolder:
    """A folder that is created when the first object is written. An object's version is a digest of its content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self.url = str(self.folder)

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        with self._temporary(name) as (temporary, target):
            temporary.write_bytes(data)
            _publish(temporary, target, create=create)
        return _version(data)

    def swap(self, name: str, data: bytes, version: str) -> str:
        if not version:
            return self.write(name, data, create=True)
        with self._lock(name), self._temporary(name) as (temporary, target):
            if not target.exists() or _version(target.read_bytes()) != version:
                raise FileExistsError(f"{target} has another version now")
            temporary.write_bytes(data)
            _publish(temporary, target, create=False)
        return _version(data)

    def write_file(self, name: str, path: Path) -> None:
        try:
            source = path.open("rb")
        except OSError as error:
            raise OutputError(f"{path} can't be read: {error.strerror or error}") from error
        with source, self._temporary(name) as (temporary, target):
            with temporary.open("wb") as sink:
                shutil.copyfileobj(source, sink, BLOCK)
            _publish(temporary, target, create=False)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open an object for reading. Raises FileNotFoundError and OutputError.

        Links are not followed below the folder, as others may have written them: they can lead to any file of the
        reader's. A pipe or a device may never answer.
        """
        target = self.folder / check_object_name(name)
        try:
            with os.fdopen(self._open_file(name), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.ELOOP, "")
                yield file
        except FileNotFoundError:
            raise
        except OSError as error:
            is_foreign = error.errno == errno.ELOOP or self._is_linked(target)
            if is_foreign:
                reason = "it is not a file of the folder (a link, a pipe or a device)"
                raise ForeignFileError(f"{target} can't be read: {reason}") from error
            raise OutputError(f"{target} can't be read: {error.strerror or error}") from error

    def _open_file(self, name: str) -> int:
        *folders, file = name.split("/")
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in folders:
                outer, handle = handle, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                os.close(outer)
            return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=handle)
        finally:
            os.close(handle)

    def _is_linked(self, target: Path) -> bool:
        """Return whether a path of the folder is a link, or leads through one."""
        return any(path.is_symlink() for path in (target, *target.parents) if self.folder in path.parents)

    def read_version(self, name: str) -> tuple[bytes, str]:
        data = self.read(name)
        return data, _version(data)

    def written(self, name: str) -> float:
        target = self.folder / check_object_name(name)
        try:
            return target.stat().st_mtime
        except FileNotFoundError:
            raise
        except OSError as error:
            raise OutputError(f"{target} can't be read: {error.strerror or error}") from error

    def list(self, prefix: str = "") -> list[str]:
        top = self.folder / prefix.rpartition("/")[0]
        if self._is_linked(top):
            raise OutputError(f"{top} can't be listed: it is a link")
        paths = (Path(folder, file) for folder, _, files in os.walk(top, onerror=_on_list_error) for file in files)
        names = (path.relative_to(self.folder).as_posix() for path in paths if not path.name.startswith(HIDDEN))
        return sorted(name for name in names if name.startswith(prefix) and "\\" not in name)

    def delete(self, name: str) -> None:
        """Delete an object, and folders that it leaves empty, as a bucket has none either."""
        target = self.folder / check_object_name(name)
        try:
            target.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(target, error) from error
        with suppress(OSError):  # not empty
            while (target := target.parent) != self.folder:
                target.rmdir()

    def within(self, seconds: float) -> Self:
        return self

    def soft_delete_days(self) -> float:
        return 0.0

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Allow one swap at a time among all processes; the system releases the lock of a killed one."""
        import fcntl  # Windows, which lacks it, shows the help of each command

        path = self.folder / LOCK
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = path.open("wb")
        except OSError as error:
            raise _unwritable(self.folder / check_object_name(name), error) from error
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _temporary(self, name: str) -> Iterator[tuple[Path, Path]]:
        """Create a temporary file beside the target, on the same file system, and always remove it."""
        target = self.folder / check_object_name(name)
        try:
            temporary = _create_beside(target)
        except OSError as error:
            raise _unwritable(target, error) from error
        try:
            yield temporary, target
        except FileExistsError:
            raise
        except OSError as error:
            raise _unwritable(target, error) from error
        finally:
            temporary.unlink(missing_ok=True)


def _create_beside(target: Path) -> Path:
    temporary = target.with_name(f"{HIDDEN}{uuid4().hex}")
    while True:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.touch(exist_ok=False)
        except FileNotFoundError:  # a delete has just removed the empty folder
            continue
        return temporary


def _publish(temporary: Path, target: Path, *, create: bool) -> None:
    """Publish a complete file under its name. A hard link fails if the name is taken; a rename replaces it."""
    _sync(temporary)
    if create:
        os.link(temporary, target)
    else:
        temporary.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _version(data: Buffer) -> str:
    return hashlib.sha256(as_bytes(data)).hexdigest()


def _on_list_error(error: OSError) -> None:
    """Ignore a folder that doesn't exist, or was just deleted. Raises OutputError for other errors."""
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise OutputError(f"{error.filename} can't be listed: {error.strerror or error}") from error


def _unwritable(target: Path, error: OSError) -> OutputError:
    return OutputError(f"{target} can't be written: {explain_disk_error(error, target)}")


def explain_disk_error(error: OSError, path: Path) -> str:
    """Return the text of a disk error; for a full disk with the space left and what to do."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error.strerror or str(error)
    problem = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
    folder = next((each for each in path.parents if each.is_dir()), Path("/"))
    total, _, free = (size / 1e6 for size in shutil.disk_usage(folder))
    return f"{problem} ({free:,.1f} MB of {total:,.1f} MB are free at {folder}): free some space, or use another disk"
