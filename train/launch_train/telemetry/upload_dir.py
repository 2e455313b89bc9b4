"""Spool folder on disk: one file per object; the file name encodes the object's name.

Entries are created atomically, so a killed process leaves no partial ones. A process locks its folder while it lives;
others may take over an unlocked folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote
from weakref import WeakSet

from launch_train.common.errors import OutputError
from launch_train.common.storage import Storage, create_variant
from launch_train.common.storage.local import explain_disk_error

PREFIX = "launch-spool-"
LOCK = "lock"
"""File that the owner locks; contains the URL of the run folder."""


@dataclass(frozen=True)
class SpoolEntry:
    """A file of a spool: the object's name, its position in the queue, and whether to create or replace the object."""

    path: Path
    number: int
    name: str
    create: bool

    @classmethod
    def of(cls, path: Path) -> SpoolEntry | None:
        """Parse a file name into an entry; None for the lock and for incomplete files."""
        number, _, rest = path.name.partition(".")
        kind, _, name = rest.partition(".")
        known = number.isdecimal() and kind in _KINDS
        return cls(path, int(number), unquote(name), kind == _KINDS[0]) if known else None

    def send(self, storage: Storage) -> None:
        """Upload the object and delete the file. Idempotent. Raises GoneError and the errors of the storage."""
        try:
            data = self.path.read_bytes() if self.create else None
            self.path.stat()
        except FileNotFoundError as error:
            raise GoneError from error
        if data is None:
            storage.write_file(self.name, self.path)
        else:
            create_variant(storage, self.name, data)
        self.path.unlink(missing_ok=True)

    def size(self) -> int:
        """Return the size in bytes; 0 if the file no longer exists."""
        return self.path.stat().st_size if self.path.exists() else 0


class GoneError(Exception):
    """The file no longer exists: another process has uploaded it."""


_KINDS = ("new", "last")


@dataclass(eq=False)
class Folder:
    """A spool folder and its open lock."""

    path: Path
    lock: IO[str]
    _next: int = field(default=0)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write` with a temporary path, which is not an entry yet. Raises OutputError."""
        try:
            write(self._half)
        except OSError as error:
            reason = explain_disk_error(error, self._half)
            with suppress(OSError):
                self._half.unlink()
            raise OutputError(f"{name} can't be kept in {self.path}: {reason}") from error

    def keep(self, name: str, *, create: bool, instead: SpoolEntry | None) -> SpoolEntry:
        """Turn the temporary file into an entry, which replaces `instead` if given. Raises OutputError."""
        number = instead.number if instead else self._next
        path = self.path / f"{number:012d}.{_KINDS[not create]}.{quote(name, safe='')}"
        try:
            self._half.replace(path)
        except OSError as error:
            raise OutputError(f"{name} can't be kept in {self.path}: {explain_disk_error(error, path)}") from error
        self._next = max(self._next, number + 1)
        return SpoolEntry(path, number, name, create)

    @property
    def last(self) -> int:
        """Return the highest number in use, or -1."""
        return self._next - 1

    @property
    def _half(self) -> Path:
        return self.path / ".half"

    def entries(self) -> list[SpoolEntry]:
        """Return the entries in the order in which they were queued."""
        parsed = (SpoolEntry.of(path) for path in self.path.iterdir())
        return sorted((entry for entry in parsed if entry), key=lambda entry: entry.number)

    def remove(self) -> None:
        """Delete the folder with its content, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


_OPEN: WeakSet[Folder] = WeakSet()


def _let_go() -> None:
    """Close inherited locks in a forked child, which may outlive the parent: an open copy keeps the lock held."""
    for folder in _OPEN:
        folder.lock.close()


os.register_at_fork(after_in_child=_let_go)


def new_folder(base: str | None, url: str) -> Folder:
    """Create and lock a spool folder in `base` (None: the default temporary folder). Raises OutputError.

    The folder is renamed to its final name after it is locked, so that no process ever sees it without an owner.
    """
    try:
        if base:
            Path(base).mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        lock = (hidden / LOCK).open("x", encoding="utf-8")
        lock.write(url)
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = Folder(hidden.replace(hidden.with_name(hidden.name[1:])), lock)
    except OSError as error:
        place = Path(base or tempfile.gettempdir())
        raise OutputError(
            f"cannot create an upload folder in {place}: {explain_disk_error(error, place / 'x')}"
        ) from error
    _OPEN.add(folder)
    return folder


@contextmanager
def taken_over(path: Path, url: str) -> Iterator[Folder | None]:
    """Lock and yield the spool of a dead process; None if its owner lives or it belongs to another run folder."""
    try:
        lock = (path / LOCK).open("r", encoding="utf-8")
    except OSError:  # not a spool, or another process has just removed it
        yield None
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        yield Folder(path, lock) if path.is_dir() and lock.read() == url else None
