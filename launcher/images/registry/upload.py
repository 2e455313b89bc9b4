"""Upload one blob to a registry in pieces. A broken connection costs at most one piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, Self, TypeVar

from launcher.images.registry.errors import RegistryError, codes, done, said
from launcher.images.registry.http import Ask, Http
from launcher.images.registry.retry import TransientError
from launcher.images.registry.session import RegistryCall, Wire, may_push

if TYPE_CHECKING:
    from requests import Response

T = TypeVar("T")

CHUNK: Final = 16 << 20
"""Bytes per PATCH request."""

SINGLE: Final = 8 << 20
"""Blobs up to this size, in bytes, are sent in one PUT: two requests instead of three."""

BLOCK: Final = 1 << 16
"""Bytes per read."""

FORGOTTEN: Final = (404, 410, 416)
"""Statuses after which an upload's position must be requested, or the upload restarted."""

DAMAGED: Final = ("DIGEST_INVALID", "SIZE_INVALID")


@dataclass(frozen=True)
class Blob:
    """Bytes to send. `open` opens them at their start, once for each try."""

    repository: str
    digest: str
    size: int
    open: Callable[[], BinaryIO]


class Upload:
    """The upload of one blob: started by a POST, sent by PATCHes and completed by a PUT, or sent by the PUT alone.

    After a failure, the registry is first asked whether the blob exists, because only the last response may have been
    lost. Then it is asked how many bytes it has, and the upload resumes from there, or restarts if the registry does
    not know. Docker's registry 2.8 knows only between two pieces:
    https://github.com/distribution/distribution/pull/3755.
    """

    def __init__(self, wire: Wire, blob: Blob, chunk: int | None, on_bytes: Callable[[int], None]) -> None:
        self._wire = wire
        self._blob = blob
        self._chunk = chunk if chunk and blob.size > SINGLE else None
        self._on_bytes = on_bytes
        self._location: str | None = None
        self._offset = 0
        self._furthest = 0
        self._damaged = False
        self._broken = False
        self._done = False
        self._tries = wire.policy.begin(wire.words(self._call("POST", "")))

    def run(self) -> None:
        """Upload the blob. Raises as `Registry.upload` does."""
        while not self._done:
            try:
                if self._broken:
                    self._take_up()
                else:
                    self._go_on()
            except TransientError as error:
                self._broken = True
                self._tries.wait(error)
        self._on_bytes(self._blob.size)

    def _go_on(self) -> None:
        if self._location is None:
            self._begin()
        elif self._chunk is None:
            self._finish(self._location, 0)
        elif self._offset < self._blob.size:
            self._send(self._location, min(self._chunk, self._blob.size - self._offset))
        else:
            self._finish(self._location, self._offset)

    def _take_up(self) -> None:
        """Find out the state of the upload after a failure."""
        if self._is_there():
            self._done = True
            return
        if self._location and self._chunk:
            self._ask_how_far(self._location)
        else:
            self._location = None
        self._broken = False

    def _begin(self) -> None:
        call = self._call("POST", f"/v2/{self._blob.repository}/blobs/uploads/")
        response = self._wire.once(call)
        if response.status_code not in (201, 202):
            raise self._wire.refusal(call, response)
        self._moved(response)
        self._reached(0)

    def _send(self, location: str, size: int) -> None:
        """Send one piece.

        The registry reports how many bytes it has; without a report it has all of them. If it does not support pieces,
        the blob is sent as a whole.
        """
        first = self._offset
        headers = {"Content-Range": f"{first}-{first + size - 1}", "Content-Type": "application/octet-stream"}
        response = self._answer(self._call("PATCH", location, headers, body=self._part(first, size)))
        self._moved(response)
        reached = _end(response) or first + size
        if not first < reached <= first + size:
            raise TransientError(f"the registry has {reached} bytes, after {first} and a piece of {size}")
        self._reached(reached)

    def _finish(self, location: str, first: int) -> None:
        """Complete the upload, with the bytes from `first` on."""
        params, size = (("digest", self._blob.digest),), self._blob.size - first
        body = self._part(first, size) if size else b""
        headers = {"Content-Type": "application/octet-stream"}
        response = self._answer(self._call("PUT", location, headers, params, body))
        found = response.headers.get("Docker-Content-Digest", self._blob.digest)
        if found != self._blob.digest:
            raise RegistryError(f"{self._tries.what}: the registry stored {found}")
        self._done = True

    def _answer(self, call: RegistryCall) -> Response:
        """Return a successful response.

        Raises TransientError: the upload is at another position, or bytes were damaged."""
        response = self._wire.once(call)
        if done(response):
            return response
        problem = codes(response)
        if set(problem) & set(DAMAGED) and not self._damaged:
            self._damaged, self._location = True, None
            raise TransientError(said(response))
        if call.ask.method == "PATCH" and (response.status_code in (405, 501) or "UNSUPPORTED" in problem):
            self._chunk, self._location = None, None
            raise TransientError(said(response))
        if response.status_code in FORGOTTEN and "NAME_UNKNOWN" not in problem:
            self._location = self._location if response.status_code == 416 else None
            raise TransientError(said(response))
        raise self._wire.refusal(call, response)

    def _is_there(self) -> bool:
        call = self._call("HEAD", f"/v2/{self._blob.repository}/blobs/{self._blob.digest}")
        return self._wire.once(call).status_code == 200

    def _ask_how_far(self, location: str) -> None:
        response = self._wire.once(self._call("GET", location))
        reached = _end(response) if done(response) else None
        if reached is None:
            self._location = None
            return
        self._moved(response)
        self._reached(reached)

    def _moved(self, response: Response) -> None:
        """Store the upload's URL, which may change with each response."""
        found = response.headers.get("Location") or self._location
        if not found:
            raise RegistryError(f"{self._tries.what}: the registry returned no upload URL")
        self._location = self._wire.url(found)

    def _reached(self, offset: int) -> None:
        self._offset = offset
        if offset > self._furthest:
            self._furthest = offset
            self._tries.progressed()
        self._on_bytes(offset)

    def _part(self, first: int, size: int) -> Callable[[], BlobRange]:
        return lambda: BlobRange(self._blob.open, first, size, self._wire.http)

    def _call(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        params: tuple[tuple[str, str], ...] = (),
        body: bytes | Callable[[], BlobRange] = b"",
    ) -> RegistryCall:
        ask = Ask(method, self._wire.url(path), headers or {}, params, body)
        return RegistryCall(f"send {self._blob.digest}", self._blob.repository, (may_push(self._blob.repository),), ask)


class BlobRange:
    """A range of a blob, read while it is sent."""

    def __init__(self, open: Callable[[], BinaryIO], first: int, size: int, http: Http) -> None:  # noqa: A002 - as in Blob
        self._open = open
        self._first = first
        self._size = size
        self._left = size
        self._http = http

    def __enter__(self) -> Self:
        self._file = self._reading(self._open)
        self._reading(lambda: self._file.seek(self._first))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.read(BLOCK):
            yield piece

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. Raises RegistryError: the file can't be read, or is shorter than expected."""
        self._http.go_on()
        wanted = self._left if size < 0 else min(size, self._left)
        piece = self._reading(lambda: self._file.read(wanted))
        if wanted and not piece:
            raise RegistryError("a layer's file has become shorter while it was sent", "Start again.")
        self._left -= len(piece)
        self._http.count(len(piece))
        return piece

    @staticmethod
    def _reading(what: Callable[[], T]) -> T:
        """Convert an error of the disk. Errors of the connection are OSErrors too, but they are retried."""
        try:
            return what()
        except OSError as error:
            raise RegistryError(f"a layer's file can't be read: {error}") from error


def _end(response: Response) -> int | None:
    """Return the number of bytes that an upload has, from a response's Range header. None: unknown.

    "0-0" stands for both zero bytes and one byte.
    """
    found = re.fullmatch(r"(?:bytes=)?0-(\d+)", response.headers.get("Range", ""))
    return int(found[1]) + 1 if found and found[1] != "0" else None
