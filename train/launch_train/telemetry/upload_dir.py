"""A spool's folder: one file for each object, whose name says which object it is.

A file is there whole or not at all, at whatever moment its process is killed. The folder's lock is held as long as
the process lives, so that others know what they may take over.
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
"""Locked by the living process; holds the address of the run folder."""


@dataclass(frozen=True)
class Entry:
    """One file of a spool: the object's name, whether it is to be created rather than replaced, and its place among
    the others."""

    path: Path
    number: int
    name: str
    create: bool

    @classmethod
    def of(cls, path: Path) -> Entry | None:
        """The entry that a file is; None for the lock and for files that are not whole."""
        number, _, rest = path.name.partition(".")
        kind, _, name = rest.partition(".")
        known = number.isdecimal() and kind in _KINDS
        return cls(path, int(number), unquote(name), kind == _KINDS[0]) if known else None

    def send(self, storage: Storage) -> None:
        """To the run folder; sent twice it is there once. Raises GoneError, and what the storage raises."""
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
        """Bytes; 0 if the file has gone."""
        return self.path.stat().st_size if self.path.exists() else 0


class GoneError(Exception):
    """The file isn't there any more: another process has sent it."""


_KINDS = ("new", "last")


@dataclass(eq=False)
class Folder:
    """A spool's folder, and its lock while it is open."""

    path: Path
    lock: IO[str]
    _next: int = field(default=0)

    def write(self, name: str, write: Callable[[Path], object]) -> None:
        """Have `write` write an object to a file that is no entry yet. Raises OutputError."""
        try:
            write(self._half)
        except OSError as error:
            reason = explain_disk_error(error, self._half)
            with suppress(OSError):
                self._half.unlink()
            raise OutputError(f"{name} can't be kept in {self.path}: {reason}") from error

    def keep(self, name: str, *, create: bool, instead: Entry | None) -> Entry:
        """Make what was written an entry, in the place of another if one is given."""
        number = instead.number if instead else self._next
        path = self.path / f"{number:012d}.{_KINDS[not create]}.{quote(name, safe='')}"
        try:
            self._half.replace(path)
        except OSError as error:
            raise OutputError(f"{name} can't be kept in {self.path}: {explain_disk_error(error, path)}") from error
        self._next = max(self._next, number + 1)
        return Entry(path, number, name, create)

    @property
    def last(self) -> int:
        """The highest number in use."""
        return self._next - 1

    @property
    def _half(self) -> Path:
        return self.path / ".half"

    def entries(self) -> list[Entry]:
        """What is kept, in the order in which it was put."""
        found = (Entry.of(path) for path in self.path.iterdir())
        return sorted((entry for entry in found if entry), key=lambda entry: entry.number)

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


_OPEN: WeakSet[Folder] = WeakSet()


def _let_go() -> None:
    """In a forked process: a lock is held until all have closed it, and the child may live longer."""
    for folder in _OPEN:
        folder.lock.close()


os.register_at_fork(after_in_child=_let_go)


def new_folder(base: str | None, url: str) -> Folder:
    """A folder of this process in `base` (None: where temporary files go). Raises OutputError.

    It gets its name once it is locked: nobody ever finds it without an owner.
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
        raise OutputError(f"no spool can be made in {place}: {explain_disk_error(error, place / 'x')}") from error
    _OPEN.add(folder)
    return folder


@contextmanager
def taken_over(path: Path, url: str) -> Iterator[Folder | None]:
    """The spool of a process that has gone; None if it lives, or wrote to another run folder than `url`."""
    try:
        lock = (path / LOCK).open("r", encoding="utf-8")
    except OSError:  # no spool, or another has just removed it
        yield None
        return
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        yield Folder(path, lock) if path.is_dir() and lock.read() == url else None
