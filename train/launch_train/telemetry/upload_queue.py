"""Queue objects on the local disk and upload them to the run folder from a thread.

Queuing an object never waits for the network, and the object survives while the disk does: `sweep` uploads the spool of
a killed process. A run folder on the local disk needs no spool.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Protocol

from launch_train.common import contract
from launch_train.common.backoff import Backoff
from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder, Storage, UnreachableError, create_variant
from launch_train.common.storage.names import check_name
from launch_train.telemetry.throttled_warning import ThrottledWarning
from launch_train.telemetry.upload_dir import PREFIX, Folder, GoneError, SpoolEntry, new_folder, taken_over

SEND_SECONDS = 60.0
"""Timeout of one upload in seconds, plus the time to send the object at SLOWEST."""

SLOWEST = 1e6
"""Slowest expected upload speed, in bytes per second."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""First and longest wait between two tries, in seconds; the wait doubles after each failure."""


class Outbox(Protocol):
    """Accepts objects for the run folder. Thread-safe."""

    @property
    def folder(self) -> Path | None:
        """Return the folder of objects that are not uploaded yet; None if there is no such folder.

        Other files in it are removed with it, or by `sweep` if the process is killed.
        """

    def put(self, name: str, data: bytes) -> None:
        """Create an object. If the name is taken by different content, use the next free variant of the name.

        Raises OutputError if the local disk is full.
        """

    def put_file(self, name: str, path: Path) -> None:
        """Replace an object with the file's current content. Only the last of several is sure to be uploaded.

        Raises OutputError.
        """

    def replace(self, name: str, data: bytes) -> None:
        """Replace an object, as `put_file` does."""

    def wait(self, seconds: float) -> bool:
        """Retry now and wait up to `seconds`; return whether all objects queued before are uploaded."""

    def close(self, seconds: float) -> None:
        """Wait up to `seconds`, then stop. May be called again; does nothing in a forked child.

        Raises OutputError that says how much is not uploaded, and where it is.
        """


def open_outbox(storage: Storage, env: Mapping[str, str]) -> Outbox:
    """Open the outbox of this process; for a bucket, a spool in `env`'s LAUNCH_SPOOL. Raises OutputError."""
    if isinstance(storage, LocalFolder):
        return Direct(storage)
    return Spool(storage, new_folder(env.get(contract.SPOOL), storage.url))


class Direct:
    """Writes synchronously; `put` and `put_file` raise the errors."""

    folder = None

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put(self, name: str, data: bytes) -> None:
        create_variant(self._storage, name, data)

    def put_file(self, name: str, path: Path) -> None:
        self._storage.write_file(name, path)

    def replace(self, name: str, data: bytes) -> None:
        self._storage.write(name, data)

    def wait(self, seconds: float) -> bool:
        return True

    def close(self, seconds: float) -> None: ...


class Spool:
    """Keeps objects as files and uploads them in order from a thread. Only their names are in memory.

    A refused object does not block the others and is retried; while the storage is unreachable, all wait.
    """

    def __init__(self, storage: Storage, folder: Folder) -> None:
        self._storage, self._folder, self._pid = storage, folder, os.getpid()
        self._fresh: OrderedDict[int, SpoolEntry] = OrderedDict()
        self._refused: OrderedDict[int, SpoolEntry] = OrderedDict()
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

    @property
    def folder(self) -> Path:
        return self._folder.path

    def put(self, name: str, data: bytes) -> None:
        self._add(check_name(name), lambda half: half.write_bytes(data), create=True)

    def put_file(self, name: str, path: Path) -> None:
        self._add(check_name(name), lambda half: shutil.copyfile(path, half), create=False)

    def replace(self, name: str, data: bytes) -> None:
        self._add(check_name(name), lambda half: half.write_bytes(data), create=False)

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
                instead = None if create else self._replaceable(name)
                entry = self._folder.keep(name, create=create, instead=instead)
                if not create:
                    self._files[name] = entry
                if not instead:
                    self._fresh[entry.number] = entry
                    self._news.notify_all()

    def _replaceable(self, name: str) -> SpoolEntry | None:
        """Return the queued older content of the same object, unless it is being uploaded."""
        entry = self._files.get(name)
        return None if entry is None or self._sending == entry else entry

    def _first(self) -> float:
        """Return the lowest number that is not uploaded."""
        return min(next(iter(self._fresh), inf), min(self._refused, default=inf))

    def _run(self) -> None:
        while entry := self._next():
            try:
                entry.send(self._storage.within(SEND_SECONDS + entry.size() / SLOWEST))
            except GoneError:
                self._sent(entry)
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
            if not entry.create and self._files.get(entry.name) != entry:
                self._drop(entry)
            elif isinstance(error, UnreachableError):
                self._all.begin()
            else:
                self._others.begin()
                self._refused[entry.number] = entry
                self._refused.move_to_end(entry.number)
                self._fresh.pop(entry.number, None)
        self._warning.failed(entry.name, error)

    def _drop(self, entry: SpoolEntry) -> None:
        """Drop an entry superseded while its upload ran: a retry would overwrite the newer content."""
        entry.path.unlink(missing_ok=True)
        self._fresh.pop(entry.number, None)
        self._refused.pop(entry.number, None)
        self._news.notify_all()


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


def sweep(folder: Path, storage: Storage, seconds: float) -> int:
    """Upload what dead processes left in their spools in `folder`, for at most `seconds`.

    Returns the number of objects that remain. Skips spools of living processes and of other run folders.
    """
    until = time.monotonic() + seconds
    spools = sorted(path for path in folder.glob(f"{PREFIX}*") if path.is_dir()) if folder.is_dir() else []
    return sum(_swept(path, storage, until) for path in spools)


def _swept(path: Path, storage: Storage, until: float) -> int:
    with taken_over(path, storage.url) as spool:
        if spool is None:
            return 0
        left = sum(not _arrives(entry, storage, until) for entry in _newest(spool.entries()))
        if not left:
            spool.remove()
        return left


def _newest(entries: Sequence[SpoolEntry]) -> list[SpoolEntry]:
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
    except GoneError:
        return True
    except OutputError:
        return False
    return True
