"""Stands between this process's stdout and stderr and where they led: all that it and its children write goes on as it
comes, and is handed to `take` as well, with the number of its descriptor.

Pipes and threads of this process, not a program of its own: the node kills whatever descends from it when a generation
is over. Bytes are never decoded. Lines stay whole: a pipe keeps writes of up to 4096 bytes in one piece (pipe(7)); of a
read of as many, which may end inside of a longer write, the last line waits for its end.
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
"""Bytes, and the descriptor to which they were written: 1 where both lead to one place."""
Left = Callable[[], float]
"""Seconds that are left; it may shrink at once when the node is told to stop."""

_BLOCK: Final = 1 << 16
"""What a pipe holds (pipe(7)), so that one read empties it."""
_REST_MS: Final = 100
"""How long it waits."""


class Tee:
    """Both streams, from its making to `close`. Where they lead to one place, one pipe stands in for both: what is
    written to them stays in its order."""

    def __init__(self, take: Take) -> None:
        """Raises OSError where stdout or stderr is closed."""
        sys.stdout.flush()
        sys.stderr.flush()
        groups: list[tuple[int, ...]] = [(1, 2)] if os.path.sameopenfile(1, 2) else [(1,), (2,)]
        self._streams = [_Stream(numbers, take) for numbers in groups]

    def close(self, left: Left) -> None:
        """Put stdout and stderr back, and pass on what was written until now. A process that still holds a pipe open is
        not waited for; a reader that takes nothing is, for as long as `left` says."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        for stream in self._streams:
            stream.restore()
        for stream in self._streams:
            stream.join(left)


class _Stream:
    """A pipe in the place of the descriptors `numbers`, and a thread that empties it into where they led."""

    def __init__(self, numbers: tuple[int, ...], take: Take) -> None:
        self._numbers = numbers
        self._take = take
        self._real = os.dup(numbers[0])
        self._pipe, into = os.pipe()
        for number in numbers:
            os.dup2(into, number)  # inheritable, unlike all the others
        os.close(into)
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"tee-{numbers[0]}", daemon=True)
        self._thread.start()

    def restore(self) -> None:
        for number in self._numbers:
            os.dup2(self._real, number)
        os.close(self._waker)

    def join(self, left: Left) -> None:
        while self._thread.is_alive() and (seconds := left()) > 0:
            self._thread.join(min(0.1, seconds))

    def _run(self) -> None:
        try:
            self._pump()
        finally:  # who still writes to the pipe is told that it is gone
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
            if ready and not block:  # nobody holds the other end any more
                break
            rest = self._pass(rest + block, cut=len(block) >= select.PIPE_BUF)
        self._drain(rest)

    def _drain(self, rest: bytes) -> None:
        """What is in the pipe now, and no more: somebody may write for ever."""
        waiting = array.array("i", [0])
        fcntl.ioctl(self._pipe, termios.FIONREAD, waiting)
        while waiting[0] > 0 and (block := os.read(self._pipe, min(_BLOCK, waiting[0]))):
            waiting[0] -= len(block)
            rest = self._pass(rest + block, cut=waiting[0] > 0)
        self._pass(rest, cut=False)

    def _pass(self, data: bytes, *, cut: bool) -> bytes:
        """Hand it on; with `cut` the beginning of the last line is kept back and returned."""
        end = data.rfind(b"\n") + 1 if cut else 0
        whole, rest = (data[:end], data[end:]) if end else (data, b"")
        if whole:
            self._take(whole, self._numbers[0])
            with suppress(OSError):  # a reader that has gone, a full disk: the job goes on
                _write(self._real, whole)
        return rest


def _write(descriptor: int, data: bytes) -> None:
    """All of it, also where the descriptor doesn't block (a terminal that another program has set so)."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 1.0)
