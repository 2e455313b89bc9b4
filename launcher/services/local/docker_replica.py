"""A replica in a container: its output, exit code and signals."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from launcher.images.docker_engine import docker_errors
from launcher.services.local.supervisor import OnLine

DRAIN_SECONDS = 5
KILL_SECONDS = 30.0
"""Wait for a killed container's end: one that hangs in a driver does not end."""
WRONG_PLATFORM = re.compile(r"^(exec |standard_init_linux\.go).*exec format error$")
"""runc's output if the container's program is for another processor."""


class ContainerReplica:
    """One running container, and the threads that read its output and wait for its end."""

    def __init__(self, name: str, api: Any, id_: str, output: Any, on_line: OnLine) -> None:
        """`id_`: the container's id; `output`: the stream of (stdout, stderr), attached before its start."""
        self.name = name
        self.is_wrong_platform = False
        self._api = api
        self._id = id_
        self._code: int | None = None
        self._fault: Exception | None = None
        self._reader = threading.Thread(target=self._read, args=(output, on_line), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self, output: Any, on_line: OnLine) -> None:
        from docker.utils.socket import SocketError

        streams = (LineSplitter(), LineSplitter())
        try:
            with suppress(OSError, SocketError):  # the connection broke: `_wait` fails too
                for parts in output:
                    for lines, part in zip(streams, parts, strict=True):
                        for line in lines.feed(part or b""):
                            self._pass(line, on_line)
            for lines in streams:
                for line in lines.rest():
                    self._pass(line, on_line)
        finally:
            with suppress(OSError):  # the engine has closed it already
                output.close()

    def _pass(self, line: str, on_line: OnLine) -> None:
        self.is_wrong_platform = self.is_wrong_platform or bool(WRONG_PLATFORM.match(line))
        on_line(self.name, line)

    def _wait(self) -> None:
        try:
            self._code = int(self._api.wait(self._id, timeout=None)["StatusCode"])
        except Exception as error:  # noqa: BLE001 -- re-raised in the main thread
            self._fault = error

    def poll(self) -> int | None:
        """Return its exit code (128 plus the signal's number after a signal); None while it runs."""
        if self._fault:
            with docker_errors(f"can't wait for the end of {self.name}"):
                raise self._fault
        return self._code

    def terminate(self) -> None:
        """Send SIGTERM to PID 1."""
        self._signal("SIGTERM")

    def kill(self) -> None:
        """Send SIGKILL to PID 1; the kernel then kills all other processes of the container."""
        self._signal("SIGKILL")
        self._waiter.join(KILL_SECONDS)

    def _signal(self, name: str) -> None:
        from docker.errors import APIError

        if self._code is None:
            with docker_errors(f"can't stop {self.name}"), suppress(APIError):  # it has ended meanwhile
                self._api.kill(self._id, name)

    def drain(self) -> None:
        """Wait until all of its output was passed on."""
        self._reader.join(DRAIN_SECONDS)


class LineSplitter:
    """Split a stream of bytes into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """Yield the lines that `data` completes, without newlines."""
        self._rest += data
        if b"\n" in data:
            *complete, last = bytes(self._rest).split(b"\n")
            self._rest = bytearray(last)
            yield from (line.decode(errors="replace").rstrip("\r") for line in complete)

    def rest(self) -> Iterator[str]:
        """Yield the last line if it has no newline."""
        if self._rest:
            yield self._rest.decode(errors="replace").rstrip("\r")
