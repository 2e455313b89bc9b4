"""What must reach the run folder in the end: put on this machine's disk at once, and sent from there by a thread.

Who puts never waits for the network, and nothing that was put is lost while the disk lives: what a process that was
killed has left in its spool, `sweep` sends. For a run folder on this machine there is no spool.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Protocol

from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder, Storage, UnreachableError, create_variant
from launch_train.common.storage.names import check_name
from launch_train.telemetry.throttled_warning import ThrottledWarning
from launch_train.telemetry.upload_dir import PREFIX, Entry, Folder, GoneError, new_folder, taken_over

SEND_SECONDS = 60.0
"""For one object, and as long again as SLOWEST takes to carry it."""

SLOWEST = 1e6
"""Bytes a second."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between two tries: they double from the one to the other."""


class Outbox(Protocol):
    """Takes objects for the run folder. Any thread may put and wait."""

    @property
    def folder(self) -> Path | None:
        """Where it keeps what has not arrived: what else is put there goes with it, also when its process is killed.
        None: it keeps nothing."""

    def put(self, name: str, data: bytes) -> None:
        """Create an object; if its name is taken by other content, under the next free variant of the name.

        Raises OutputError if this machine's disk takes no more.
        """

    def put_file(self, name: str, path: Path) -> None:
        """Replace an object by the file's content of now. Of several such, the last wins. Raises OutputError."""

    def wait(self, seconds: float) -> bool:
        """Whether all that was put before has arrived, after so many seconds at most. Trouble is tried again now."""

    def close(self, seconds: float) -> None:
        """Wait, then stop. Raises OutputError that says how much is left, and where it lies. May be called again.
        Does nothing in a process that was forked: what is put belongs to the process that opened it."""


def open_outbox(storage: Storage, env: Mapping[str, str]) -> Outbox:
    """The outbox of this process: for a bucket a spool in `env`'s LAUNCH_SPOOL. Raises OutputError."""
    if isinstance(storage, LocalFolder):
        return Direct(storage)
    return Spool(storage, new_folder(env.get(contract.SPOOL), storage.url))


class Direct:
    """Writes at once; errors are raised by who puts."""

    folder = None

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def put(self, name: str, data: bytes) -> None:
        create_variant(self._storage, name, data)

    def put_file(self, name: str, path: Path) -> None:
        self._storage.write_file(name, path)

    def wait(self, seconds: float) -> bool:
        return True

    def close(self, seconds: float) -> None: ...


class Spool:
    """Files on disk, and a thread that sends them in their order. In memory are their names only.

    An object that is refused lets the others pass and is tried again; while nothing can be reached, all wait.
    """

    def __init__(self, storage: Storage, folder: Folder) -> None:
        self._storage, self._folder, self._pid = storage, folder, os.getpid()
        self._fresh: OrderedDict[int, Entry] = OrderedDict()
        self._refused: OrderedDict[int, Entry] = OrderedDict()
        self._files: dict[str, Entry] = {}
        """By name: the newest content of an object that is replaced."""
        self._sending: Entry | None = None
        self._all, self._others = Pause(), Pause()
        """Until when nothing is tried, and none of what was refused."""
        self._warning = ThrottledWarning(folder.path, storage.url)
        self._closed = False
        self._putting = threading.Lock()
        self._news = threading.Condition()
        # A daemon, so that a process which fails elsewhere can end; what it leaves is swept.
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        return self._folder.path

    def put(self, name: str, data: bytes) -> None:
        self._add(check_name(name), lambda half: half.write_bytes(data), create=True)

    def put_file(self, name: str, path: Path) -> None:
        self._add(check_name(name), lambda half: shutil.copyfile(path, half), create=False)

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
            self._folder.lock.close()  # for who sweeps; the thread may still be at one of them, which does no harm
            raise OutputError(_left_over(left, self._storage.url, self._folder.path, seconds))
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

    def _replaceable(self, name: str) -> Entry | None:
        """An older content of the same object, if it isn't on its way."""
        entry = self._files.get(name)
        return None if entry is None or self._sending == entry else entry

    def _first(self) -> float:
        """The lowest number that has not arrived."""
        return min(next(iter(self._fresh), inf), min(self._refused, default=inf))

    def _run(self) -> None:
        while entry := self._next():
            try:
                entry.send(self._storage.within(SEND_SECONDS + entry.size() / SLOWEST))
            except GoneError:
                self._sent(entry)
            except Exception as error:  # noqa: BLE001 - whatever it is: nothing is dropped, and training goes on
                self._failed(entry, error)
            else:
                self._sent(entry)

    def _next(self) -> Entry | None:
        """What is to be sent now; waits for it. None at the end."""
        with self._news:
            while not self._closed:
                queue = self._fresh or self._refused
                pause = self._all if self._fresh else max(self._all, self._others, key=Pause.left)
                if queue and pause.left() <= 0:
                    self._sending = next(iter(queue.values()))
                    return self._sending
                self._news.wait(pause.left() if queue else None)
            return None

    def _sent(self, entry: Entry) -> None:
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

    def _failed(self, entry: Entry, error: Exception) -> None:
        with self._news:
            self._sending = None
            if not entry.create and self._files.get(entry.name) != entry:
                self._drop(entry)
            elif isinstance(error, UnreachableError):
                self._all = self._all.after_another()
            else:
                self._others = self._others.after_another()
                self._refused[entry.number] = entry
                self._refused.move_to_end(entry.number)
                self._fresh.pop(entry.number, None)
        self._warning.failed(entry.name, error)

    def _drop(self, entry: Entry) -> None:
        """While it was on its way newer content came, which it must not replace when it is tried again."""
        entry.path.unlink(missing_ok=True)
        self._fresh.pop(entry.number, None)
        self._refused.pop(entry.number, None)
        self._news.notify_all()


@dataclass(frozen=True)
class Pause:
    """Nothing is tried until a time of the monotonic clock; the next pause is `following` seconds long."""

    until: float = 0.0
    following: float = field(default_factory=lambda: FIRST_WAIT)

    def left(self) -> float:
        return self.until - time.monotonic()

    def after_another(self) -> Pause:
        """The pause after one more failure."""
        return Pause(time.monotonic() + self.following, min(2 * self.following, LONGEST_WAIT))


def _left_over(left: Sequence[Entry], url: str, folder: Path, seconds: float) -> str:
    what = f"{len(left)} objects" if len(left) > 1 else left[0].name
    size = sum(entry.size() for entry in left) / 1e6
    place = f"{'they lie' if len(left) > 1 else 'it lies'} in {folder}"
    return f"{what} ({size:,.3f} MB) did not reach {url} in {seconds:.0f} s: {place}; keep this machine's disk"


def sweep(folder: Path, storage: Storage, seconds: float) -> int:
    """Send what processes that have gone left in their spools in `folder`, for so many seconds at most.

    Returns how many objects are still there. Spools of living processes and of other run folders are left alone.
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


def _newest(entries: Sequence[Entry]) -> list[Entry]:
    """Of each object that is replaced only the newest content: the files of the older are removed."""
    newest = {entry.name: entry for entry in entries if not entry.create}
    old = [entry for entry in entries if not entry.create and newest[entry.name] != entry]
    for entry in old:
        entry.path.unlink(missing_ok=True)
    return [entry for entry in entries if entry not in old]


def _arrives(entry: Entry, storage: Storage, until: float) -> bool:
    """Whether it does while there is time."""
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
