"""Copy what this process and its children write to stdout and stderr to a callback, without holding it back.

Uses pipes and threads of this process: a separate program would be killed with the node's other descendants at the end
of a generation. Bytes are never decoded. Lines stay whole: a write of up to 4096 bytes to a pipe is atomic (pipe(7)).
If a read returns at least that many bytes, it may end inside a longer write, so its last line waits for the rest.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

Take = Callable[[bytes, int], None]
"""Receives bytes and the file descriptor they were written to; 1 for both if they lead to the same file."""
Left = Callable[[], float]
"""Returns the seconds left; the value may drop at any time when the node is asked to stop."""

_BLOCK: Final = 1 << 16
"""Capacity of a pipe in bytes (pipe(7)): one read empties it."""
_REST_MS: Final = 100
"""Longest time in milliseconds that an incomplete line is held back."""


def join_within(thread: threading.Thread, left: Left) -> None:
    """Wait for a thread in the time left."""
    while thread.is_alive() and (seconds := left()) > 0:
        thread.join(min(0.1, seconds))


class Tee:
    """Captures both streams until `close`. If both lead to the same file, they share one pipe to keep their order."""

    def __init__(self, take: Take) -> None:
        """Start to capture. Raises OSError if stdout or stderr is closed."""
        sys.stdout.flush()
        sys.stderr.flush()
        groups: list[tuple[int, ...]] = [(1, 2)] if os.path.sameopenfile(1, 2) else [(1,), (2,)]
        self._streams = [_Stream(numbers, take) for numbers in groups]

    def close(self, left: Left) -> None:
        """Restore stdout and stderr, and pass on what was written so far.

        Does not wait for processes that still hold a pipe open. Waits at most `left()` seconds for a blocked reader.
        """
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for stream in self._streams:
            stream.restore()
        for stream in self._streams:
            join_within(stream.thread, left)


class _Stream:
    """Pipe that replaces the descriptors `numbers`, and a thread that copies it to their original file."""

    def __init__(self, numbers: tuple[int, ...], take: Take) -> None:
        self._numbers = numbers
        self._take = take
        self._real = os.dup(numbers[0])
        self._pipe, into = os.pipe()
        for number in numbers:
            os.dup2(into, number)  # inheritable, unlike the other descriptors
        os.close(into)
        self._wake, self._waker = os.pipe()
        self.thread = threading.Thread(target=self._run, name=f"tee-{numbers[0]}", daemon=True)
        self.thread.start()

    def restore(self) -> None:
        for number in self._numbers:
            os.dup2(self._real, number)
        os.close(self._waker)

    def _run(self) -> None:
        try:
            self._pump()
        finally:  # processes that still write to the pipe get EPIPE
            for descriptor in (self._pipe, self._wake, self._real):
                os.close(descriptor)

    def _pump(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        rest = b""
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(_REST_MS if rest else None)]
            if self._wake in ready:
                break
            block = os.read(self._pipe, _BLOCK) if ready else b""
            if ready and not block:  # all writers have closed the pipe
                break
            rest = self._pass(rest + block, cut=len(block) >= select.PIPE_BUF)
        self._drain(rest)

    def _drain(self, rest: bytes) -> None:
        """Pass on only what is in the pipe now: a process may keep writing forever."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._pipe, termios.FIONREAD, waiting)
        while waiting[0] > 0 and (block := os.read(self._pipe, min(_BLOCK, waiting[0]))):
            waiting[0] -= len(block)
            rest = self._pass(rest + block, cut=waiting[0] > 0)
        self._pass(rest, cut=False)

    def _pass(self, data: bytes, *, cut: bool) -> bytes:
        """Pass data on; with `cut`, return the incomplete last line instead of passing it on."""
        end = data.rfind(b"\n") + 1 if cut else 0
        whole, rest = (data[:end], data[end:]) if end else (data, b"")
        if whole:
            self._take(whole, self._numbers[0])
            with suppress(OSError):  # the reader exited or the disk is full; the job continues
                _write_all(self._real, whole)
        return rest


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, even if the descriptor is non-blocking (as some programs leave a terminal)."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 1.0)
