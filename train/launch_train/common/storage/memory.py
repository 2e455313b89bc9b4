"""A Storage in this process's memory, for a run whose folder can't be used."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from launch_train.common.errors import OutputError
from launch_train.common.storage.names import Buffer, as_bytes, check_object_name

if TYPE_CHECKING:
    from typing import Self  # Python 3.11


class MemoryFolder:
    """Objects in memory: content, version (a count of writes) and time of the last write."""

    url = "memory"

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now`: the clock of `written`, in seconds."""
        self._now = now
        self._lock = threading.RLock()
        self._writes = 0
        self._objects: dict[str, tuple[bytes, str, float]] = {}

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        with self._lock:
            if create and name in self._objects:
                raise FileExistsError(name)
            self._writes += 1
            version = str(self._writes)
            self._objects[check_object_name(name)] = bytes(as_bytes(data)), version, self._now()
            return version

    def swap(self, name: str, data: bytes, version: str) -> str:
        with self._lock:
            if version and (name not in self._objects or self._objects[name][1] != version):
                raise FileExistsError(name)
            return self.write(name, data, create=not version)

    def write_file(self, name: str, path: Path) -> None:
        try:
            self.write(name, path.read_bytes())
        except OSError as error:
            raise OutputError(f"{path} can't be read: {error.strerror or error}") from error

    def read(self, name: str) -> bytes:
        return self.read_version(name)[0]

    def read_version(self, name: str) -> tuple[bytes, str]:
        if check_object_name(name) not in self._objects:
            raise FileNotFoundError(name)
        return self._objects[name][:2]

    def written(self, name: str) -> float:
        self.read(name)
        return self._objects[name][2]

    def list(self, prefix: str = "") -> builtins.list[str]:
        return sorted(name for name in self._objects if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self._objects.pop(check_object_name(name), None)

    def within(self, seconds: float) -> Self:
        return self

    def soft_delete_days(self) -> float:
        return 0.0
