"""A folder on a host as a Storage: ssh://HOST/PATH, with /~/PATH below the home folder."""

from __future__ import annotations

import re
import select
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from launch_train.common.storage import OutputError, UnreachableError
from launch_train.common.storage.local import ForeignFileError
from launch_train.common.storage.names import Buffer, as_bytes
from launch_train.host.folder_server import MARK, receive, send
from launcher import errors
from launcher.remote.agent import NO_TRAINER, Agent
from launcher.remote.connection import CONNECT_SECONDS, connect_to

SCHEME: Final = "ssh://"
CALL_SECONDS: Final = 60.0


class Address(NamedTuple):
    """The parts of a folder's URL: what ssh knows the host by, and the path there (absolute, or ~/…)."""

    host: str
    path: str

    @property
    def url(self) -> str:
        return f"{SCHEME}{self.host}/{self.path.lstrip('/')}"


def parse_address(url: str) -> Address:
    """Return the parts of ssh://HOST/PATH. Raises OutputError."""
    match = re.fullmatch(rf"{SCHEME}([^/]+)/(.+)", url)
    if not match:
        raise OutputError(f"invalid folder {url}: use ssh://HOST/PATH, or ssh://HOST/~/PATH for one in your home")
    return Address(match[1], match[2].rstrip("/") if match[2].startswith("~/") else f"/{match[2].rstrip('/')}")


class HostFolder:
    """A Storage on a host. A process there serves the folder over the shared connection; if either ends, the next call
    starts it again, and a create or swap whose answer was lost is recognised by its content."""

    def __init__(self, url: str, seconds: float = CALL_SECONDS, server: FolderServer | None = None) -> None:
        """Raises OutputError: invalid URL. Connects on the first call."""
        self.address = parse_address(url)
        self.url = self.address.url
        self._seconds = seconds
        self._server = server or FolderServer(self.address)

    def within(self, seconds: float) -> Self:
        return type(self)(self.url, seconds, self._server)

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        return str(self._call({"method": "write", "name": name, "create": create}, bytes(as_bytes(data)))[0])

    def swap(self, name: str, data: bytes, version: str) -> str:
        return str(self._call({"method": "swap", "name": name, "version": version}, data)[0])

    def write_file(self, name: str, path: Path) -> None:
        self.write(name, path.read_bytes())

    def read(self, name: str) -> bytes:
        return self._call({"method": "read", "name": name})[1]

    def read_version(self, name: str) -> tuple[bytes, str]:
        version, content = self._call({"method": "read_version", "name": name})
        return content, str(version)

    def written(self, name: str) -> float:
        return float(self._call({"method": "written", "name": name})[0])

    def list(self, prefix: str = "") -> list[str]:
        return [str(name) for name in self._call({"method": "list", "name": prefix})[0]]

    def delete(self, name: str) -> None:
        self._call({"method": "delete", "name": name})

    def soft_delete_days(self) -> float:
        return 0.0

    def _call(self, request: Mapping[str, Any], data: bytes = b"") -> tuple[Any, bytes]:
        answer, content, is_repeated = self._server.call(request, data, self._seconds)
        match answer.get("error"):
            case None:
                return answer["value"], content
            case "exists":
                if is_repeated:  # the first answer was lost: an object with this content is this call's own
                    with suppress(FileNotFoundError):
                        present, version = self.read_version(request["name"])
                        if present == data:
                            return version, b""
                raise FileExistsError(str(answer["text"]))
            case "missing":
                raise FileNotFoundError(f"{self.url}/{request['name']}")
            case "foreign":
                raise ForeignFileError(str(answer["text"]))
        raise OutputError(str(answer["text"]))


class FolderServer:
    """The process on a host that serves one folder (launch_train.host.folder_server). Thread-safe: one call at a
    time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._agent = Agent(connect_to(address.host))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        servers.add(self)

    def call(self, request: Mapping[str, Any], data: bytes, seconds: float) -> tuple[dict[str, Any], bytes, bool]:
        """Send a request; return the answer, its bytes, and whether the request was sent twice, over a new connection,
        as the first answer was lost.

        Raises UnreachableError: no answer within so many seconds, or no connection; OutputError: the host refuses it.
        """
        with self._lock:
            is_repeated = False
            while True:
                try:
                    process = self._process or self._start(seconds)
                    if process.stdin is None:
                        raise BrokenPipeError
                    send(process.stdin, request, data)
                    return (*self._answer(process, seconds), is_repeated)
                except (BrokenPipeError, ConnectionError, EOFError, ValueError) as error:
                    self.close()
                    if is_repeated:
                        raise UnreachableError(f"{self._address.host}: the connection was lost") from error
                    is_repeated = True
                except BaseException:  # such as Ctrl-C: the answer would be taken for that of the next request
                    self.close()
                    raise

    def _start(self, seconds: float) -> subprocess.Popen[bytes]:
        """Start the server, and wait until it answers. Raises EOFError: it has ended."""
        deadline = seconds + CONNECT_SECONDS
        for is_sent in (False, True):
            try:
                process = self._process = self._agent.serve(self._address.path)
                if process.stdout is None:
                    raise EOFError
                if not select.select([process.stdout], [], [], deadline)[0]:
                    self.close()
                    raise UnreachableError(f"{self._address.host} gave no answer for {deadline:.0f} s")
                marks = 0
                while marks < 2 and (line := process.stdout.readline()):  # the connection's, then the server's
                    marks += line.endswith(MARK)
                if marks == 2:
                    self._answer(process, seconds)
                    return process
                code = process.wait()
                self.close()
                if code == NO_TRAINER and not is_sent:
                    self._agent.send_trainer()
                    continue
                self._agent.call("jobs", {"ids": []})  # raises the error, with its reason
            except errors.UnreachableError as error:
                raise UnreachableError(str(error)) from error
            except errors.LaunchError as error:
                raise OutputError(str(error)) from error
        raise EOFError

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> tuple[dict[str, Any], bytes]:
        """Return the next answer. Raises EOFError: the server has ended; UnreachableError: none in time."""
        if process.stdout is None:
            raise EOFError
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            answer = receive(process.stdout)
        finally:
            timer.cancel()
        if answer is None:
            if timer.finished.is_set() and not timer.is_alive() and process.poll() == -9:
                self.close()
                raise UnreachableError(f"{self._address.host} gave no answer for {seconds:.0f} s")
            raise EOFError
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):
                    if pipe:
                        pipe.close()
        self._process = None


servers: Final[set[FolderServer]] = set()
"""Those of this process."""


@cache
def open_host_folder(url: str) -> HostFolder:
    """Return the folder at a URL; the same one each time, as each has a process. Raises OutputError."""
    return HostFolder(url)
