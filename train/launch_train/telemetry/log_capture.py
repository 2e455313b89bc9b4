"""Capture the output of a node and its processes as create-only parts in the run folder (runfolder.text_part).

Log text is best effort. The tee (train/launch_train/telemetry/tee.py) reads it from pipes into a bounded buffer, which
a separate thread empties. A slow bucket, a broken network or a full disk never blocks or ends a run, and some disk
space stays free for checkpoints and metrics. A line in the log marks text that could not be stored.
"""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.storage import Storage
from launch_train.telemetry.cloud_logging import LogUploader
from launch_train.telemetry.tee import Left, Tee, join_within
from launch_train.telemetry.upload_queue import Outbox, open_outbox, remove_empty_folders

Say = Callable[[str], None]
T = TypeVar("T")

PART: Final = 1 << 20
"""Bytes after which a part is written at once."""
BUFFER: Final = 1 << 26
"""Bytes that may be buffered: less than a second of the fastest output, hours of typical output."""
RESERVE: Final = 1 << 30
"""Bytes of disk (at most a tenth of the disk) that are left free for checkpoints and metrics."""
_AGAIN_S: Final = 5.0
_LINE_S: Final = 60.0
_SLICE_S: Final = 2.0
"""Longest uninterrupted wait in seconds; between two, the node checks for a stop request."""


class TextCapture:
    """Captures output from construction on, and stores it once `keep` is called. Does nothing if not `wanted`."""

    def __init__(self, *, wanted: bool, every: float, say: Say, uploader: LogUploader | None = None) -> None:
        """Write a part every `every` seconds. `uploader` receives the same output."""
        self.heard = -math.inf
        """time.monotonic() of the newest output."""
        self.listener: Callable[[bytes], None] | None = None
        """Also receives the output; it must not wait."""
        self._say = say
        self._uploader = uploader
        self._buffer = Buffer(every)
        self._tee: Tee | None = None
        self._writer: LogWriter | None = None
        self._spool: Path | None = None
        if wanted:
            with suppress(OSError):  # stdout or stderr is closed: nothing to capture
                self._tee = Tee(self._take)

    def keep(self, storage: Storage, attempt: int, node: int, spool: Path | None) -> None:
        """Start to write parts, including the output so far."""
        self._spool = spool
        if self._tee:
            self._writer = LogWriter(self._buffer, storage, attempt, node, spool, self._say)

    def drop(self) -> None:
        """Discard all text without a message: the caller reports that the run folder is not writable."""
        if self._writer:
            self._writer.drop()

    def flush(self) -> None:
        """Write the buffered text now; called when the processes have exited."""
        self._buffer.hurry()

    def close(self, left: Left) -> None:
        """Restore stdout and stderr, write the rest in the time left, and remove the spool folder if it is empty."""
        if self._tee:
            self._tee.close(left)
        if self._uploader:
            self._uploader.end()
        if self._writer:
            self._writer.close(left)
        if self._uploader:
            self._uploader.close(left)
        if self._spool:
            remove_empty_folders(self._spool)

    def _take(self, data: bytes, number: int) -> None:
        self.heard = time.monotonic()
        self._buffer.add(data)
        if listener := self.listener:
            listener(data)
        if self._uploader:
            self._uploader.add(data, number)


class Buffer:
    """Queue between the pipes and the writer. `add` never blocks."""

    def __init__(self, every: float, size: int = BUFFER) -> None:
        self._every = every
        self._most = size
        self._chunks: list[bytes] = []
        self._size = self._missed = 0
        self._first = 0.0
        self._hurried = self._closed = False
        self._news = threading.Condition()

    def add(self, data: bytes) -> None:
        """Append. If the buffer is full, count bytes as missing until `take` empties it, so that there is one gap."""
        with self._news:
            if self._missed or self._size + len(data) > self._most:
                self._missed += len(data)
                return
            if not self._size:
                self._first = time.monotonic()
            if not self._size or self._size + len(data) >= PART > self._size:
                self._news.notify()
            self._chunks.append(data)
            self._size += len(data)

    def hurry(self) -> None:
        """Make the buffered text due now."""
        with self._news:
            self._hurried = self._size > 0
            self._news.notify()

    def close(self) -> None:
        """Signal that nothing more will be added."""
        with self._news:
            self._closed = True
            self._news.notify()

    def take(self) -> bytes | None:
        """Wait until a part is due and return it; None once the buffer is closed and empty."""
        with self._news:
            while not self._due():
                self._news.wait(self._first + self._every - time.monotonic() if self._size else None)
            self._hurried = False
            block, missed = b"".join(self._chunks), self._missed
            self._chunks, self._size, self._missed = [], 0, 0
        if missed:
            block += b"launch: %d bytes of text are missing here: they could not be stored in time\n" % missed
        return block or None

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the buffer was closed."""
        with self._news:
            return self._news.wait_for(lambda: self._closed, seconds)

    def _due(self) -> bool:
        if self._closed:
            return True
        old = time.monotonic() - self._first >= self._every
        return bool(self._size) and (self._hurried or old or self._size >= PART)


class LogWriter:
    """Thread that writes the parts."""

    def __init__(self, buffer: Buffer, storage: Storage, attempt: int, node: int, spool: Path | None, say: Say) -> None:
        self._buffer = buffer
        self._storage = storage
        self._attempt = attempt
        self._node = node
        self._spool = spool
        self._say = say
        self._outbox: Outbox | None = None
        self._part = 0
        self._lost = self._dropped = False
        self._said = float("-inf")
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Discard the rest without a message."""
        self._dropped = True

    def close(self, left: Left) -> None:
        """Write the rest and wait for the uploads in the time left; report what could not be stored."""
        self._buffer.close()
        join_within(self._thread, left)
        if self._dropped:
            return
        if self._lost or self._thread.is_alive():
            self._say("the last log lines could not be stored")
        if self._outbox is None:  # the run folder was never reached
            return
        try:
            while (seconds := left()) > _SLICE_S and not self._outbox.wait(_SLICE_S):
                pass
            self._outbox.close(min(seconds, _SLICE_S))
        except OutputError as error:
            self._say(f"log lines: {error}")

    def _run(self) -> None:
        self._outbox = outbox = self._until_done(self._open)
        while outbox and (block := self._buffer.take()) is not None:
            self._until_done(partial(self._put, outbox, block))

    def _until_done(self, act: Callable[[], T]) -> T | None:
        """Retry `act` until it succeeds, and once more after the buffer is closed; None if that fails as well."""
        said = False
        while not self._dropped:
            closed = self._buffer.wait(0.0)
            try:
                done = act()
            except (OutputError, OSError) as error:
                said = self._complain(error) or said
                if closed:
                    self._lost = True
                    return None
                self._buffer.wait(_AGAIN_S)
            else:
                if said:
                    self._say("log lines are stored again")
                return done
        return None

    def _open(self) -> Outbox:
        """Open the outbox. Part numbers continue after those of an earlier container of this node."""
        self._part = runfolder.next_part(self._storage, runfolder.text_part(self._attempt, self._node, 0))
        return open_outbox(self._storage, {contract.SPOOL: str(self._spool)} if self._spool else {})

    def _put(self, outbox: Outbox, block: bytes) -> None:
        folder = self._spool or Path(self._storage.url)
        while not folder.exists():
            folder = folder.parent
        disk = shutil.disk_usage(folder)
        if disk.free < min(RESERVE, disk.total // 10):
            raise OutputError(f"only {disk.free / 1e9:.1f} GB are free on the disk of {folder}")
        outbox.put(runfolder.text_part(self._attempt, self._node, self._part), block)
        self._part += 1

    def _complain(self, error: Exception) -> bool:
        """Report an error at most once a minute; return whether it was reported."""
        if time.monotonic() - self._said < _LINE_S:
            return False
        self._said = time.monotonic()
        self._say(f"log lines are not being stored, retrying: {error}")
        return True
