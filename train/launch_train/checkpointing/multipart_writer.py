"""Upload one rank's share of a checkpoint: a torch.save file, cut into objects that are sent in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from launch_train import runfolder
from launch_train.common.errors import TrainError
from launch_train.common.storage import Storage, UnreachableError
from launch_train.common.storage.bucket import checksum

PART_BYTES = 16 << 20
"""Size of one object."""

WORKERS = 8
"""Concurrent uploads: the default of Google's transfer manager."""


class CancelledError(TrainError):
    """A save was cancelled for another one."""


class CheckpointPart(NamedTuple):
    name: str
    bytes: int
    crc32c: str
    """Base64, as in Cloud Storage. It finds every flipped bit, at a third of the cost of SHA-256."""


def write_shard(
    storage: Storage, folder: str, rank: int, content: Any, *, deadline: float, cancelled: threading.Event
) -> tuple[CheckpointPart, ...]:
    """Store what one rank saves (tensors and plain values) as parts, in parallel, and return them.

    `deadline` is a time.monotonic(). Raises OutputError, also at the deadline, and CancelledError once `cancelled` is
    set.
    """
    import torch

    with _workers() as pool:
        writer = _PartWriter(storage, f"{folder}/rank-{rank:05d}", pool, deadline, cancelled)
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # takes a fifth of the time; ours are checked instead
        try:
            torch.save(content, writer)  # type: ignore[arg-type]  # it only needs write and flush
        finally:
            torch.serialization.set_crc32_options(before)
        return writer.finish()


def time_writing(storage: Storage, rank: int, size: int, *, deadline: float, cancelled: threading.Event) -> float:
    """Return the seconds that it takes to store `size` bytes, from a test with as many as all workers send at once.

    What a killed process leaves is removed like an unfinished checkpoint. Raises as `write_shard`, but at the deadline
    it returns what the size takes at least.
    """
    folder = f"{runfolder.checkpoint_folder(0, WRITE_TEST)}-{rank:05d}"
    tested, began = min(size, WORKERS * PART_BYTES), time.monotonic()
    with _workers() as pool:
        writer = _PartWriter(storage, f"{folder}/rank-{rank:05d}", pool, deadline, cancelled)
        writer.write(bytes(tested))
        try:
            parts = writer.finish()
        except UnreachableError:
            if time.monotonic() < deadline:
                raise
            parts = ()
    seconds = time.monotonic() - began
    for part in parts:
        storage.delete(f"{folder}/{part.name}")
    return seconds * max(1.0, size / max(1, tested))


WRITE_TEST = "0000-write-test"
"""Stands in the place of a start's name: before all of them."""


def _workers() -> Executor:
    """Return an executor whose threads have all started.

    Python 3.12 and later start no thread while the interpreter exits, which is when a script's last save may begin:
    then the calling thread sends the parts itself.
    """
    pool, all_there = ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint"), threading.Barrier(WORKERS)
    try:
        for _ in range(WORKERS):
            pool.submit(all_there.wait)
    except RuntimeError:
        all_there.abort()
        pool.shutdown()
        return _InlineExecutor()
    return pool


class _InlineExecutor(Executor):
    """Runs each task at once in the calling thread."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            done.set_exception(error)
        return done


TRY_SECONDS = 60.0
"""Limit of one upload request, and so of the time that a cancelled save continues."""

_SPARE: list[bytearray] = []
"""Buffers of earlier saves, at most WORKERS + 1: touching new memory costs as much as sending it."""


class _PartWriter:
    """A writable file whose content becomes objects of PART_BYTES. Its buffers are reused, which bounds the memory."""

    def __init__(
        self, storage: Storage, stem: str, pool: Executor, deadline: float, cancelled: threading.Event
    ) -> None:
        self._storage, self._stem, self._pool = storage, stem, pool
        self._deadline, self._cancelled = deadline, cancelled
        self._free = threading.Semaphore(WORKERS + 1)
        self._parts: list[Future[CheckpointPart]] = []
        self._buffer, self._filled = self._next_buffer(), 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        while len(view) and not self._has_failed():  # torch would replace an error raised here
            taken = min(len(view), PART_BYTES - self._filled)
            _copy(view[:taken], self._buffer, self._filled)
            self._filled += taken
            view = view[taken:]
            if self._filled == PART_BYTES:
                self._send()
                self._buffer, self._filled = self._next_buffer(), 0
        return size

    def flush(self) -> None:
        """Do nothing: parts are sent when they are full."""

    def finish(self) -> tuple[CheckpointPart, ...]:
        """Return the parts once all are stored. Raises the error of a failed upload."""
        if self._filled and not self._has_failed():
            self._send()
        return tuple(part.result() for part in self._parts)

    def _has_failed(self) -> bool:
        return any(part.done() and part.exception() for part in self._parts[-2 * WORKERS :])

    def _next_buffer(self) -> bytearray:
        self._free.acquire()
        try:
            buffer = _SPARE.pop()
        except IndexError:
            return bytearray(PART_BYTES)
        return buffer if len(buffer) == PART_BYTES else bytearray(PART_BYTES)

    def _send(self) -> None:
        name = f"{self._stem}-{len(self._parts):04d}.part"
        self._parts.append(self._pool.submit(self._store, name, self._buffer, self._filled))

    def _store(self, name: str, buffer: bytearray, size: int) -> CheckpointPart:
        try:
            data = memoryview(buffer)[:size]
            digest = checksum(data)
            self._write(name, data, digest)
            return CheckpointPart(name.rpartition("/")[2], size, digest)
        finally:
            if len(_SPARE) <= WORKERS:
                _SPARE.append(buffer)
            self._free.release()

    def _write(self, name: str, data: memoryview, digest: str) -> None:
        """Upload one part, retrying until the deadline unless the save is cancelled."""
        while not self._cancelled.is_set():
            left = self._deadline - time.monotonic()
            try:
                self._storage.within(max(0.1, min(left, TRY_SECONDS))).write(name, data, crc32c=digest)
            except UnreachableError:
                if left <= TRY_SECONDS:
                    raise
            else:
                return
        raise CancelledError("cancelled for another save")


def _copy(source: memoryview, target: bytearray, at: int) -> None:
    """Copy with NumPy, which releases the GIL; a slice assignment would block the sending threads."""
    import numpy as np

    np.frombuffer(target, np.uint8)[at : at + len(source)] = np.frombuffer(source, np.uint8)
