"""Queue objects on the local disk and upload them to the run folder from a thread.

Queuing an object never waits for the network, and the object survives while the disk does. A queue is a spool folder
with one file per object, whose name encodes the object's. Entries are created atomically, so a killed process leaves no
partial ones. A process locks its folder while it lives; `sweep` and `Leftovers` upload what dead processes left. A run
folder on the local disk needs no spool.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote, unquote
from weakref import WeakSet

from launch_train.common import contract
from launch_train.common.backoff import Backoff
from launch_train.common.console import say
from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder, Storage, UnreachableError, create_variant
from launch_train.common.storage.local import explain_disk_error
from launch_train.common.storage.names import check_object_name

SEND_SECONDS = 60.0
"""Timeout of one upload in seconds, plus the time to send the object at SLOWEST."""

SLOWEST = 1e6
"""Slowest expected upload speed, in bytes per second."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""First and longest wait between two tries, in seconds; the wait doubles after each failure."""


MIN_INTERVAL_SECONDS = 60.0
"""Minimum time between two warnings."""

PREFIX = "launch-spool-"
LOCK = "lock"
"""File that the owner locks; contains the URL of the run folder."""

_SLICE_S: Final = 10.0
"""Longest single try in seconds; between two, the node checks for a stop request."""


class Outbox:
    """Accepts objects for the run folder, and writes them at once: a local one. Thread-safe."""

    folder: Path | None = None
    """The folder of objects that are not uploaded yet, if there is one.

    Other files in it are removed with it, or by `sweep` if the process is killed.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put(self, name: str, data: bytes) -> None:
        """Create an object. If the name is taken by different content, use the next free variant of the name.

        Raises OutputError if the local disk is full.
        """
        create_variant(self._storage, name, data)

    def put_file(self, name: str, path: Path) -> None:
        """Replace an object with the file's current content. Only the last of several is sure to be uploaded.

        Raises OutputError.
        """
        self._storage.write_file(name, path)

    def replace(self, name: str, data: bytes) -> None:
        """Replace an object, as `put_file` does."""
        self._storage.write(name, data)

    def wait(self, seconds: float) -> bool:
        """Retry now and wait up to `seconds`; return whether all objects queued before are uploaded."""
        return True

    def close(self, seconds: float) -> None:
        """Wait up to `seconds`, then stop. May be called again; does nothing in a forked child.

        Raises OutputError that says how much is not uploaded, and where it is.
        """


def open_outbox(storage: Storage, env: Mapping[str, str]) -> Outbox:
    """Open the outbox of this process; for a bucket, a spool in `env`'s LAUNCH_SPOOL. Raises OutputError."""
    if isinstance(storage, LocalFolder):
        return Outbox(storage)
    return Spool(storage, new_folder(env.get(contract.SPOOL), storage.url))


class Spool(Outbox):
    """Keeps objects as files and uploads them in order from a thread. Only their names are in memory.

    A refused object does not block the others and is retried; while the storage is unreachable, all wait.
    """

    def __init__(self, storage: Storage, folder: Folder) -> None:
        super().__init__(storage)
        self.folder: Path = folder.path
        self._folder, self._pid = folder, os.getpid()
        self._fresh: dict[int, SpoolEntry] = {}
        self._refused: dict[int, SpoolEntry] = {}
        self._files: dict[str, SpoolEntry] = {}
        """The newest content of each replaceable object, by name."""
        self._sending: SpoolEntry | None = None
        self._all, self._others = Pause(), Pause()
        """Pause of all uploads, and pause of the refused ones."""
        self._warning = ThrottledWarning(folder.path, storage.url)
        self._closed = False
        self._putting = threading.Lock()
        self._news = threading.Condition()
        # A daemon, so that a process that fails elsewhere can exit; a sweep uploads the rest.
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def put(self, name: str, data: bytes) -> None:
        self._add(check_object_name(name), lambda half: half.write_bytes(data), create=True)

    def put_file(self, name: str, path: Path) -> None:
        self._add(check_object_name(name), lambda half: shutil.copyfile(path, half), create=False)

    def replace(self, name: str, data: bytes) -> None:
        self._add(check_object_name(name), lambda half: half.write_bytes(data), create=False)

    def wait(self, seconds: float) -> bool:
        with self._news:
            last = self._folder.last
            self._all, self._others = Pause(), Pause()
            self._news.notify_all()
            return self._news.wait_for(lambda: self._first() > last, seconds)

    def close(self, seconds: float) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self.wait(seconds)
        with self._news:
            self._closed = True
            self._news.notify_all()
            left = [*self._fresh.values(), *self._refused.values()]
        if left:
            self._folder.lock.close()  # lets a sweep take over; uploading an object twice is harmless
            what, are = (f"{len(left)} objects", "they are") if len(left) > 1 else (left[0].name, "it is")
            raise OutputError(
                f"{what} ({sum(entry.size() for entry in left) / 1e6:,.3f} MB) did not reach {self._storage.url} in "
                f"{seconds:.0f} s: {are} in {self._folder.path}; keep this machine's disk"
            )
        self._folder.remove()

    def _add(self, name: str, write: Callable[[Path], object], *, create: bool) -> None:
        with self._putting:
            self._folder.write(name, write)
            with self._news:
                queued = None if create else self._files.get(name)
                instead = None if queued == self._sending else queued  # older content of the object
                entry = self._folder.keep(name, create=create, instead=instead)
                if not create:
                    self._files[name] = entry
                if not instead:
                    self._fresh[entry.number] = entry
                    self._news.notify_all()

    def _first(self) -> float:
        """Return the lowest number that is not uploaded."""
        return min(next(iter(self._fresh), inf), min(self._refused, default=inf))

    def _run(self) -> None:
        while entry := self._next():
            try:
                entry.send(self._storage.within(SEND_SECONDS + entry.size() / SLOWEST))
            except Exception as error:  # noqa: BLE001 - the entry is kept and retried; training continues
                self._failed(entry, error)
            else:
                self._sent(entry)

    def _next(self) -> SpoolEntry | None:
        """Wait for the next entry to upload and return it; None when closed."""
        with self._news:
            while not self._closed:
                queue = self._fresh or self._refused
                pause = self._all if self._fresh else max(self._all, self._others, key=Pause.left)
                if queue and pause.left() <= 0:
                    self._sending = next(iter(queue.values()))
                    return self._sending
                self._news.wait(pause.left() if queue else None)
            return None

    def _sent(self, entry: SpoolEntry) -> None:
        with self._news:
            if self._refused.pop(entry.number, None):
                self._others = Pause()
            self._fresh.pop(entry.number, None)
            if self._files.get(entry.name) == entry:
                del self._files[entry.name]
            self._sending, self._all = None, Pause()
            self._news.notify_all()
            well = not self._refused
        if well:
            self._warning.recovered()

    def _failed(self, entry: SpoolEntry, error: Exception) -> None:
        with self._news:
            self._sending = None
            is_superseded = not entry.create and self._files.get(entry.name) != entry
            if isinstance(error, UnreachableError) and not is_superseded:
                self._all.begin()
            else:
                self._fresh.pop(entry.number, None)
                self._refused.pop(entry.number, None)
                if is_superseded:  # while its upload ran: a retry would overwrite the newer content
                    entry.path.unlink(missing_ok=True)
                    self._news.notify_all()
                else:
                    self._others.begin()
                    self._refused[entry.number] = entry
        self._warning.failed(entry.name, error)


class Pause:
    """A pause of uploads that is longer after each failure."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_WAIT, LONGEST_WAIT)
        self._until = 0.0

    def left(self) -> float:
        return self._until - time.monotonic()

    def begin(self) -> None:
        """Begin the pause after one more failure."""
        self._until = time.monotonic() + self._backoff.wait()


class ThrottledWarning:
    """Warns when uploads begin to fail and when they work again."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._since: float | None = None
        self._warned = -inf

    def failed(self, name: str, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None and now - self._warned >= MIN_INTERVAL_SECONDS:
            self._since = self._warned = now
            at, place = time.strftime("%H:%M:%S"), self._folder
            say(f"warning: uploading {name} fails since {at}: {error}. Nothing is lost: it is in {place}; retrying")

    def recovered(self) -> None:
        if self._since is not None:
            say(f"warning: {self._url} was not reachable for {time.monotonic() - self._since:.0f} s; uploads continue")
            self._since = None


# --- The spool folder on disk -----------------------------------------------------------------------------------------


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
        """Upload the object and delete the file, unless another process has done so. Idempotent.

        Raises the errors of the storage.
        """
        try:
            data = self.path.read_bytes() if self.create else None
            self.path.stat()
        except FileNotFoundError:
            return
        if data is None:
            storage.write_file(self.name, self.path)
        else:
            create_variant(storage, self.name, data)
        self.path.unlink(missing_ok=True)

    def size(self) -> int:
        """Return the size in bytes; 0 if the file no longer exists."""
        return self.path.stat().st_size if self.path.exists() else 0


_KINDS = ("new", "last")


@dataclass(eq=False)
class Folder:
    """A spool folder and its open lock."""

    path: Path
    lock: IO[str]
    _next: int = 0

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


# A forked child may outlive its parent, and an open copy of a lock keeps it held.
os.register_at_fork(after_in_child=lambda: [folder.lock.close() for folder in _OPEN])


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


# --- What dead processes left -----------------------------------------------------------------------------------------


def sweep_spools(folder: Path, storage: Storage, seconds: float) -> int:
    """Upload what dead processes left in their spools in `folder`, for at most `seconds`.

    Returns the number of objects that remain. Skips spools of living processes and of other run folders.
    """
    until, remaining = time.monotonic() + seconds, 0
    for path in sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir()) if folder.is_dir() else []:
        with taken_over(path, storage.url) as spool:
            if spool:
                count = sum(not _arrives(entry, storage, until) for entry in _newest(spool.entries()))
                remaining += count
                if not count:
                    spool.remove()
    return remaining


def _newest(entries: list[SpoolEntry]) -> list[SpoolEntry]:
    """Return the entries without superseded content of replaceable objects, whose files are deleted."""
    newest = {entry.name: entry for entry in entries if not entry.create}
    old = [entry for entry in entries if not entry.create and newest[entry.name] != entry]
    for entry in old:
        entry.path.unlink(missing_ok=True)
    return [entry for entry in entries if entry not in old]


def _arrives(entry: SpoolEntry, storage: Storage, until: float) -> bool:
    """Upload an entry before `until`; return whether that succeeded."""
    left = until - time.monotonic()
    if left <= 0:
        return False
    try:
        entry.send(storage.within(left))
    except OutputError:
        return False
    return True


class Leftovers:
    """Spool folder of a node, with the files that its processes left in it."""

    def __init__(self, folder: Path, storage: Storage, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._storage = storage
        self._say = say

    def send(self, left: Callable[[], float]) -> int:
        """Upload files of dead processes while `left()` is positive; return the number of objects that remain."""
        while True:
            try:
                count = sweep_spools(self.folder, self._storage, max(0.1, min(_SLICE_S, left())))
            except Exception as error:  # noqa: BLE001 - a failed upload must not fail a successful run
                self._say(f"files left in {self.folder} could not be uploaded: {error}")
                return 1
            seconds = left()
            if not count or seconds <= 0:
                return count
            time.sleep(min(0.5, seconds))

    def close(self, left: Callable[[], float]) -> None:
        """Upload the rest; report files that remain, with their folder."""
        if count := self.send(left):
            files, are = ("1 file", "is") if count == 1 else (f"{count} files", "are")
            self._say(f"{files} did not reach {self._storage.url} and {are} in {self.folder}: keep this machine's disk")


def spool_folder(environ: Mapping[str, str], url: str, node: int) -> Path:
    """Create the node's spool folder for the run folder `url`, or a fresh one if that name is not safe to use.

    The name is the same at each start, so that a restarted node finds the files of the killed one. The parent is
    contract.SPOOL, TMPDIR or /var/tmp, in preference to /tmp, which may be in memory. Raises OutputError.
    """
    parent = Path(environ.get(contract.SPOOL) or environ.get("TMPDIR") or _temporary())
    folder = parent / f"launch-spools-{hashlib.sha256(url.encode()).hexdigest()[:16]}-{node:04d}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder):
            return folder
        return Path(tempfile.mkdtemp(prefix="launch-spools-", dir=parent))
    except OSError as error:
        raise OutputError(f"cannot create a folder in {parent}: {error.strerror or error}") from error


def _temporary() -> str:
    kept = "/var/tmp"  # noqa: S108 - kept across reboots (hier(7)); _is_ours checks the owner
    return kept if os.access(kept, os.W_OK) else tempfile.gettempdir()


def _is_ours(folder: Path) -> bool:
    """Return whether only this user can have created the folder: its name is predictable."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def remove_empty_folders(folder: Path) -> None:
    """Remove a folder that contains nothing but empty folders."""
    for below in sorted(folder.rglob("*"), reverse=True):
        if below.is_dir():
            with suppress(OSError):
                below.rmdir()
    with suppress(OSError):
        folder.rmdir()
