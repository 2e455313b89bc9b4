"""A client of one registry: the part of the OCI distribution API that appending a layer and pushing it need.

The client library oras-py is not used. Importing it takes 1.1 s, while a complete "nothing to do" takes 0.5 s. It also
can neither mount blobs across repositories nor resume an interrupted upload.
https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.images.registry.credentials import Auth
from launcher.images.registry.reference import HUB, is_digest, is_googles, scheme
from launcher.images.registry.transport import (
    Http,
    HttpRequest,
    RegistryError,
    RetryPolicy,
    TransientError,
    codes,
    error_text,
    is_success,
    raise_if_transient,
    refusal,
)

if TYPE_CHECKING:
    from requests import Response

ACCEPTED: Final = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.index.v1+json",
)
"""Media types of manifests: images and indexes, Docker's and OCI's."""

LARGEST: Final = 16 << 20
"""Maximum size of a manifest or blob that is read into memory. Registries accept manifests up to 4 MiB."""

CHUNK: Final = 16 << 20
"""Bytes per PATCH request."""

SINGLE: Final = 8 << 20
"""Blobs up to this size, in bytes, are sent in one PUT: two requests instead of three."""

BLOCK: Final = 1 << 16
"""Bytes per read."""

FORGOTTEN: Final = (404, 410, 416)
"""Statuses after which an upload's position must be requested, or the upload restarted."""

DAMAGED: Final = ("DIGEST_INVALID", "SIZE_INVALID")

HUBS_API: Final = "registry-1.docker.io"

T = TypeVar("T")


@dataclass(frozen=True)
class Manifest:
    """A manifest in the registry. `digest` is that of `raw`, and `body` is its parsed JSON."""

    digest: str
    media_type: str
    body: Mapping[str, Any]
    raw: bytes


class Registry:
    """One registry. Thread-safe. Credentials are looked up when the registry requests them.

    All methods raise:
        NotAuthorised: the registry accepts none of the available credentials, or they lack a permission.
        RepositoryMissing: the repository does not exist.
        RegistryError: it can't be reached, or refuses for another reason.
    """

    def __init__(
        self,
        host: str,
        environ: Mapping[str, str],
        *,
        clock: Clock = REAL,
        policy: RetryPolicy | None = None,
        chunk: int | None = CHUNK,
    ) -> None:
        """`chunk`: bytes per request of an upload. None: a blob is sent in one request.

        Raises:
            LaunchError: the extra `docker` is not installed.
        """
        self.host = host
        # "Artifact Registry does not support Docker chunked uploads":
        # https://cloud.google.com/artifact-registry/docs/reference/docker-api, read in 2026.
        self._chunk = None if is_googles(host) else chunk
        self._wire = Wire(host, environ, policy or RetryPolicy(clock))

    @property
    def sent(self) -> int:
        """Return the bytes of request bodies sent so far, including retries."""
        return self._wire.http.sent

    def head(self, repository: str, reference: str) -> str | None:
        """Return the digest of a tag, or of a digest that exists. None: it does not exist."""
        call = self._reading("HEAD", repository, f"manifests/{reference}", f"look for {reference}")
        response = self._wire.do(call)
        if response.status_code == 404:
            return None
        self._expect(response, call, 200)
        digest = response.headers.get("Docker-Content-Digest")
        if digest and is_digest(digest):
            return str(digest)
        manifest = self.manifest(repository, reference)  # the header is optional
        return manifest.digest if manifest else None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest after verifying its digest. None: it does not exist."""
        call = self._reading("GET", repository, f"manifests/{reference}", f"read {reference}")

        def read() -> Manifest | None:
            response = self._wire.once(call)
            if response.status_code == 404:
                response.close()
                return None
            self._expect(response, call, 200)
            raw = self._read_whole(response, call)
            stored = response.headers.get("Docker-Content-Digest", "")
            digest = reference if ":" in reference else stored if is_digest(stored) else None
            return self._parse_manifest(raw, _checked(raw, digest), response, call)

        return self._retry(call, read)

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob, such as an image's config, after verifying its digest."""
        call = self._reading("GET", repository, f"blobs/{digest}", f"read {digest}")

        def read() -> bytes:
            response = self._wire.once(call)
            self._expect(response, call, 200)
            raw = self._read_whole(response, call)
            _checked(raw, digest)
            return raw

        return self._retry(call, read)

    def stream(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield the bytes of a blob, unverified; closing the iterator ends the transfer. A broken transfer ends it."""
        from requests.exceptions import RequestException

        call = self._reading("GET", repository, f"blobs/{digest}", f"read {digest}")
        response = self._wire.do(call)
        self._expect(response, call, 200)
        try:
            yield from response.iter_content(1 << 16)
        except RequestException:
            return
        finally:
            response.close()

    def has(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""
        call = self._reading("HEAD", repository, f"blobs/{digest}", f"look for {digest}")
        response = self._wire.do(call)
        if response.status_code == 404:
            return False
        self._expect(response, call, 200)
        return True

    def mount(self, repository: str, digest: str, source: str) -> bool:
        """Mount a blob of the repository `source`. Return False if the registry can't; it must then be uploaded."""
        if source == repository:
            return self.has(repository, digest)
        params = (("mount", digest), ("from", source))
        request = HttpRequest("POST", self._wire.url(f"/v2/{repository}/blobs/uploads/"), params=params)
        scopes = (push_scope(repository), pull_scope(source))
        call = RegistryCall(f"mount {digest} from {source}", repository, scopes, request)
        response = self._wire.do(call)
        if response.status_code == 202:
            self._cancel(repository, response)
            return False
        self._expect(response, call, 201)
        return True

    def check_write(self, repository: str) -> None:
        """Check write access by starting and cancelling an upload.

        A missing permission is then known before a long build.
        """
        request = HttpRequest("POST", self._wire.url(f"/v2/{repository}/blobs/uploads/"))
        call = RegistryCall("begin an upload", repository, (push_scope(repository),), request)
        response = self._wire.do(call)
        self._expect(response, call, 202)
        self._cancel(repository, response)

    def upload(
        self,
        repository: str,
        digest: str,
        size: int,
        open: Callable[[], BinaryIO],  # noqa: A002 - the parameter opens the blob
        on_bytes: Callable[[int], None] = lambda total: None,
    ) -> None:
        """Upload a blob. The caller checks first that the repository does not have it.

        `open` opens the `size` bytes at their start, once for each try. `on_bytes` receives the number of bytes that
        the registry has; the number falls if a part must be sent again.
        """
        Upload(self._wire, Blob(repository, digest, size, open), self._chunk, on_bytes).run()

    def put_manifest(self, repository: str, reference: str, raw: bytes, media_type: str) -> str:
        """Write a manifest to a tag or its digest, and return its digest. All of its blobs must exist."""
        url = self._wire.url(f"/v2/{repository}/manifests/{reference}")
        request = HttpRequest("PUT", url, {"Content-Type": media_type}, body=raw)
        call = RegistryCall(f"write {reference}", repository, (push_scope(repository),), request)
        digest = digest_of(raw)
        response = self._wire.do(call)
        if not is_success(response):
            if response.status_code not in (401, 403, 404) and self.head(repository, reference) == digest:
                return digest  # another launch, or a try with a lost answer, has written this immutable tag
            raise self._wire.refusal(call, response)
        stored = response.headers.get("Docker-Content-Digest", digest)
        if stored != digest:
            raise RegistryError(f"{self._wire.describe(call)}: the registry stored {stored} instead of {digest}")
        return digest

    def stop(self) -> None:
        """Make calls in other threads fail soon. The client can't be used afterwards."""
        self._wire.http.stop()

    def close(self) -> None:
        """Close all connections."""
        self._wire.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _reading(self, method: str, repository: str, path: str, what: str) -> RegistryCall:
        headers = {"Accept": ", ".join(ACCEPTED)} if path.startswith("manifests/") else {}
        request = HttpRequest(method, self._wire.url(f"/v2/{repository}/{path}"), headers, stream=method == "GET")
        return RegistryCall(what, repository, (pull_scope(repository),), request)

    def _retry(self, call: RegistryCall, read: Callable[[], T]) -> T:
        """Call `read` until its result is complete and undamaged, and return that."""
        tries = self._wire.policy.begin(self._wire.describe(call))
        while True:
            try:
                return read()
            except TransientError as error:
                tries.wait(error)

    def _expect(self, response: Response, call: RegistryCall, status: int) -> None:
        if response.status_code != status:
            raise self._wire.refusal(call, response)

    def _read_whole(self, response: Response, call: RegistryCall) -> bytes:
        """Read the body of a response. Raises TransientError: it was cut off."""
        from requests.exceptions import RequestException

        pieces: list[bytes] = []
        try:
            for piece in response.iter_content(1 << 18):
                pieces.append(piece)
                if sum(map(len, pieces)) > LARGEST:
                    raise RegistryError(f"{self._wire.describe(call)}: it is larger than {LARGEST >> 20} MiB")
        except RequestException as error:
            raise TransientError(f"the answer was cut off: {error}") from error
        finally:
            response.close()
        return b"".join(pieces)

    def _parse_manifest(self, raw: bytes, digest: str, response: Response, call: RegistryCall) -> Manifest:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise RegistryError(f"{self._wire.describe(call)}: the registry's response is not a manifest")
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return Manifest(digest, str(body.get("mediaType") or media_type), body, raw)

    def _cancel(self, repository: str, response: Response) -> None:
        """Cancel an upload that a registry started. Errors are ignored: registries expire unfinished uploads."""
        request = HttpRequest("DELETE", self._wire.url(response.headers.get("Location", "")))
        self._wire.send_ignoring_errors(
            RegistryCall("cancel an upload", repository, (push_scope(repository),), request)
        )


def digest_of(raw: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of bytes, as in references."""
    return f"{algorithm}:{hashlib.new(algorithm, raw).hexdigest()}"


def _checked(raw: bytes, digest: str | None) -> str:
    """Return the digest of `raw`. Raises TransientError: it is not `digest`, so the bytes were damaged in transit."""
    actual = digest_of(raw, digest.partition(":")[0] if digest else "sha256")
    if digest and actual != digest:
        raise TransientError(f"damaged: it has the digest {actual}, and should have {digest}")
    return actual


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
        self._tries = wire.policy.begin(wire.describe(self._call("POST", "")))

    def run(self) -> None:
        """Upload the blob. Raises as `Registry.upload` does."""
        while not self._done:
            try:
                if self._broken:
                    self._take_up()
                else:
                    self._step()
            except TransientError as error:
                self._broken = True
                self._tries.wait(error)
        self._on_bytes(self._blob.size)

    def _step(self) -> None:
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
        stored = response.headers.get("Docker-Content-Digest", self._blob.digest)
        if stored != self._blob.digest:
            raise RegistryError(f"{self._tries.what}: the registry stored {stored}")
        self._done = True

    def _answer(self, call: RegistryCall) -> Response:
        """Return a successful response.

        Raises TransientError: the upload is at another position, or bytes were damaged."""
        response = self._wire.once(call)
        if is_success(response):
            return response
        problem = codes(response)
        if set(problem) & set(DAMAGED) and not self._damaged:
            self._damaged, self._location = True, None
            raise TransientError(error_text(response))
        if call.request.method == "PATCH" and (response.status_code in (405, 501) or "UNSUPPORTED" in problem):
            self._chunk, self._location = None, None
            raise TransientError(error_text(response))
        if response.status_code in FORGOTTEN and "NAME_UNKNOWN" not in problem:
            self._location = self._location if response.status_code == 416 else None
            raise TransientError(error_text(response))
        raise self._wire.refusal(call, response)

    def _is_there(self) -> bool:
        call = self._call("HEAD", f"/v2/{self._blob.repository}/blobs/{self._blob.digest}")
        return self._wire.once(call).status_code == 200

    def _ask_how_far(self, location: str) -> None:
        response = self._wire.once(self._call("GET", location))
        reached = _end(response) if is_success(response) else None
        if reached is None:
            self._location = None
            return
        self._moved(response)
        self._reached(reached)

    def _moved(self, response: Response) -> None:
        """Store the upload's URL, which may change with each response."""
        location = response.headers.get("Location") or self._location
        if not location:
            raise RegistryError(f"{self._tries.what}: the registry returned no upload URL")
        self._location = self._wire.url(location)

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
        request = HttpRequest(method, self._wire.url(path), headers or {}, params, body)
        return RegistryCall(
            f"send {self._blob.digest}", self._blob.repository, (push_scope(self._blob.repository),), request
        )


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
        self._http.check_stopped()
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
    match = re.fullmatch(r"(?:bytes=)?0-(\d+)", response.headers.get("Range", ""))
    return int(match[1]) + 1 if match and match[1] != "0" else None


@dataclass(frozen=True)
class RegistryCall:
    """A request, its description for errors, and the scopes that it needs."""

    what: str
    repository: str
    scopes: tuple[str, ...]
    request: HttpRequest


def pull_scope(repository: str) -> str:
    """Return the scope of a read."""
    return f"repository:{repository}:pull"


def push_scope(repository: str) -> str:
    """Return the scope of a write. Registries require both pull and push."""
    return f"repository:{repository}:pull,push"


class Wire:
    """One registry. Thread-safe."""

    def __init__(self, host: str, environ: Mapping[str, str], policy: RetryPolicy) -> None:
        self.host = host
        self.policy = policy
        self.http = Http(host)
        self.auth = Auth(host, environ, self.http, policy)
        self._root = f"{scheme(host)}://{HUBS_API if host == HUB else host}"

    def url(self, path: str) -> str:
        """Return the URL of a path below /v2/, or of a Location header.

        Behind a proxy that terminates TLS, a registry may return its own address with http:. It gets the original
        scheme.

        Raises:
            RegistryError: it is on another host, without TLS.
        """
        url = urljoin(self._root, path)
        if self._is_ours(url):
            return urlsplit(url)._replace(scheme=urlsplit(self._root).scheme).geturl()
        return self.http.allowed(url)

    def do(self, call: RegistryCall) -> Response:
        """Return the response, with retries.

        Raises:
            NotAuthorised: no credentials are accepted.
            RegistryError: all tries failed, or the registry can't be reached.
        """
        tries = self.policy.begin(self.describe(call))
        while True:
            try:
                return self.once(call)
            except TransientError as error:
                tries.wait(error)

    def once(self, call: RegistryCall) -> Response:
        """Send a request once, and again after renewing refused credentials.

        Raises:
            TransientError: no response, or a transient failure.
        """
        ours = self._is_ours(call.request.url)
        header = self.auth.header(call.scopes, self.describe(call)) if ours else None
        for refused in count():
            response = self.http.send(replace(call.request, authorization=header))
            if response.status_code != 401 or not ours or not self._is_ours(str(response.url)):
                break  # the registry's credentials are never sent to a host that it redirects to
            header = self.auth.renew(call.scopes, response, header, first=refused == 0, what=self.describe(call))
        raise_if_transient(response)
        return response

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self._root).netloc

    def send_ignoring_errors(self, call: RegistryCall) -> None:
        """Send a request once and ignore errors, because its result does not matter. Credentials are not renewed."""
        with suppress(TransientError, LaunchError):
            header = self.auth.header(call.scopes, self.describe(call))
            self.http.send(replace(call.request, authorization=header))

    def refusal(self, call: RegistryCall, response: Response) -> LaunchError:
        """Return the error for a refusal."""
        return refusal(response, self.host, call.repository, call.what, self.auth.tried())

    def describe(self, call: RegistryCall) -> str:
        """Return the operation and the host, for an error."""
        return f"{self.host}/{call.repository}: {call.what}"
