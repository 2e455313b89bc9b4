"""A replica that runs in a container: its lines, its exit code, its signals."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from launcher.rehearsal.supervisor import OnLine

DRAIN_SECONDS = 5
KILL_SECONDS = 30.0
"""How long the end of a killed container is waited for: one that hangs in a driver doesn't end."""
FOREIGN = re.compile(r"^(exec |standard_init_linux\.go).*exec format error$")
"""What runc says in the container's place when its first program is for another processor."""


class Contained:
    """One running container, and the threads that read its output and wait for its end."""

    def __init__(self, name: str, api: Any, number: str, output: Any, on_line: OnLine) -> None:
        """`number` is its id, `output` the stream of (stdout, stderr) that was attached before it was started."""
        self.name = name
        self.is_foreign = False
        self._api = api
        self._id = number
        self._code: int | None = None
        self._fault: Exception | None = None
        self._reader = threading.Thread(target=self._read, args=(output, on_line), daemon=True)
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        self._reader.start()
        self._waiter.start()

    def _read(self, output: Any, on_line: OnLine) -> None:
        from docker.utils.socket import SocketError

        streams = (Lines(), Lines())
        try:
            with suppress(OSError, SocketError):  # it broke off: `_wait` hears of it, too
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
        self.is_foreign = self.is_foreign or bool(FOREIGN.match(line))
        on_line(self.name, line)

    def _wait(self) -> None:
        try:
            self._code = int(self._api.wait(self._id, timeout=None)["StatusCode"])
        except Exception as error:  # noqa: BLE001 -- whatever it is, the main thread is to say it
            self._fault = error

    def poll(self) -> int | None:
        """Its exit code, 128 and more for a signal, as the engine says it; None while it runs."""
        if self._fault:
            with docker_errors(f"{self.name}'s end can't be learned"):
                raise self._fault
        return self._code

    def terminate(self) -> None:
        """SIGTERM to PID 1."""
        self._signal("SIGTERM")

    def kill(self) -> None:
        """SIGKILL to PID 1, with which the kernel ends all others of the container."""
        self._signal("SIGKILL")
        self._waiter.join(KILL_SECONDS)

    def _signal(self, name: str) -> None:
        from docker.errors import APIError

        if self._code is None:
            with docker_errors(f"{self.name} can't be stopped"), suppress(APIError):  # it has ended meanwhile
                self._api.kill(self._id, name)

    def drain(self) -> None:
        """Until all that the engine has of its output has been passed on."""
        self._reader.join(DRAIN_SECONDS)


class Lines:
    """Bytes as they come -> whole lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes, without their ends."""
        self._rest += data
        if b"\n" in data:
            *whole, last = bytes(self._rest).split(b"\n")
            self._rest = bytearray(last)
            yield from map(text, whole)

    def rest(self) -> Iterator[str]:
        """The last line, when it has no end."""
        if self._rest:
            yield text(bytes(self._rest))


def text(line: bytes) -> str:
    """A line as it is shown."""
    return line.decode(errors="replace").rstrip("\r")


@contextmanager
def docker_errors(problem: str) -> Iterator[None]:
    """The SDK's errors inside as one of ours, which begins with `problem`."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    from launcher.images.docker_events import EngineError, hint_for

    try:
        yield
    except APIError as error:
        said = str(error.explanation or error).strip()
        raise EngineError(f"{problem}: {said}", hint_for(said)) from error
    except (DockerException, RequestException, HTTPError, OSError) as error:
        raise EngineError(
            f"{problem}: the Docker engine doesn't answer any more ({error})", "`docker info` says whether it runs."
        ) from error
