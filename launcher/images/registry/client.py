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
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.images.reference import HUB, is_digest, is_googles, scheme
from launcher.images.registry.credentials import Auth
from launcher.images.registry.transport import (
    JITTER,
    BlobRange,
    Http,
    RegistryError,
    Request,
    TransientError,
    codes,
    is_success,
    raise_if_transient,
    refusal,
    registry_message,
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
        jitter: Callable[[], float] = JITTER,
        chunk: int | None = CHUNK,
    ) -> None:
        """`chunk`: bytes per request of an upload. None: a blob is sent in one request.

        Raises:
            LaunchError: the extra `docker` is not installed.
        """
        self.host = host
        self.http = Http(host, clock, jitter)
        # "Artifact Registry does not support Docker chunked uploads":
        # https://cloud.google.com/artifact-registry/docs/reference/docker-api, read in 2026.
        self.chunk = None if is_googles(host) else chunk
        self._auth = Auth(host, environ, self.http)
        self._root = f"{scheme(host)}://{HUBS_API if host == HUB else host}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    @property
    def sent(self) -> int:
        """Return the bytes of request bodies sent so far, including retries."""
        return self.http.sent

    def stop(self) -> None:
        """Make calls in other threads fail soon, at their next request or piece of a body. The client can't be used
        afterwards."""
        self.http.stopped = True

    # --- Manifests and blobs ------------------------------------------------------------------------------------------

    def head(self, repository: str, reference: str) -> str | None:
        """Return the digest of a tag, or of a digest that exists. None: it does not exist."""
        request = self.request("HEAD", repository, f"manifests/{reference}", f"look for {reference}", "pull")
        response = self._do(request)
        if response.status_code == 404:
            return None
        self._expect(response, request, 200)
        digest = response.headers.get("Docker-Content-Digest")
        if digest and is_digest(digest):
            return str(digest)
        manifest = self.manifest(repository, reference)  # the header is optional
        return manifest.digest if manifest else None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return the manifest of a tag or digest after verifying its digest. None: it does not exist."""
        request = self.request("GET", repository, f"manifests/{reference}", f"read {reference}", "pull")

        def read(response: Response) -> Manifest | None:
            if response.status_code == 404:
                response.close()
                return None
            self._expect(response, request, 200)
            raw = self._read_whole(response, request)
            stored = response.headers.get("Docker-Content-Digest", "")
            digest = _verified(raw, reference if ":" in reference else stored if is_digest(stored) else None)
            try:
                body = json.loads(raw)
            except ValueError:
                body = None
            if not isinstance(body, dict):
                raise RegistryError(f"{self.describe(request)}: the registry's response is not a manifest")
            media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
            return Manifest(digest, str(body.get("mediaType") or media_type), body, raw)

        return self._retried(request, read)

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob, such as an image's config, after verifying its digest."""
        request = self.request("GET", repository, f"blobs/{digest}", f"read {digest}", "pull")

        def read(response: Response) -> bytes:
            self._expect(response, request, 200)
            raw = self._read_whole(response, request)
            _verified(raw, digest)
            return raw

        return self._retried(request, read)

    def stream(self, repository: str, digest: str) -> Iterator[bytes]:
        """Yield the bytes of a blob, unverified; closing the iterator ends the transfer. A broken transfer ends it."""
        from requests.exceptions import RequestException

        request = self.request("GET", repository, f"blobs/{digest}", f"read {digest}", "pull")
        response = self._do(request)
        self._expect(response, request, 200)
        try:
            yield from response.iter_content(1 << 16)
        except RequestException:
            return
        finally:
            response.close()

    def has(self, repository: str, digest: str) -> bool:
        """Return whether the repository has a blob."""
        request = self.request("HEAD", repository, f"blobs/{digest}", f"look for {digest}", "pull")
        response = self._do(request)
        if response.status_code != 404:
            self._expect(response, request, 200)
        return response.status_code == 200

    def mount(self, repository: str, digest: str, source: str) -> bool:
        """Mount a blob of the repository `source`. Return False if the registry can't; it must then be uploaded."""
        if source == repository:
            return self.has(repository, digest)
        request = self.request(
            "POST",
            repository,
            "blobs/uploads/",
            f"mount {digest} from {source}",
            params=(("mount", digest), ("from", source)),
            reads=source,
        )
        response = self._do(request)
        if response.status_code == 202:
            self._cancel(repository, response)
            return False
        self._expect(response, request, 201)
        return True

    def check_write(self, repository: str) -> None:
        """Check write access by starting and cancelling an upload.

        A missing permission is then known before a long build.
        """
        request = self.request("POST", repository, "blobs/uploads/", "begin an upload")
        response = self._do(request)
        self._expect(response, request, 202)
        self._cancel(repository, response)

    def upload(
        self,
        repository: str,
        digest: str,
        size: int,
        open_blob: Callable[[], BinaryIO],
        on_bytes: Callable[[int], None] = lambda total: None,
    ) -> None:
        """Upload a blob. The caller checks first that the repository does not have it.

        `open_blob` opens the `size` bytes at their start, once for each try. `on_bytes` receives the number of bytes
        that the registry has; the number falls if a part must be sent again.
        """
        Upload(self, repository, digest, size, open_blob, on_bytes).run()

    def put_manifest(self, repository: str, reference: str, raw: bytes, media_type: str) -> str:
        """Write a manifest to a tag or its digest, and return its digest. All of its blobs must exist."""
        path, headers = f"manifests/{reference}", {"Content-Type": media_type}
        request = self.request("PUT", repository, path, f"write {reference}", headers=headers, body=raw)
        digest = blob_digest(raw)
        response = self._do(request)
        if not is_success(response):
            if response.status_code not in (401, 403, 404) and self.head(repository, reference) == digest:
                return digest  # another launch, or a try with a lost answer, has written this immutable tag
            raise self.refusal(response, request)
        stored = response.headers.get("Docker-Content-Digest", digest)
        if stored != digest:
            raise RegistryError(f"{self.describe(request)}: the registry stored {stored} instead of {digest}")
        return digest

    def _read_whole(self, response: Response, request: Request) -> bytes:
        """Read the body of a response. Raises TransientError: it was cut off."""
        from requests.exceptions import RequestException

        raw = bytearray()
        try:
            for piece in response.iter_content(1 << 18):
                raw += piece
                if len(raw) > LARGEST:
                    raise RegistryError(f"{self.describe(request)}: it is larger than {LARGEST >> 20} MiB")
        except RequestException as error:
            raise TransientError(f"the answer was cut off: {error}") from error
        finally:
            response.close()
        return bytes(raw)

    def _cancel(self, repository: str, response: Response) -> None:
        """Cancel an upload that a registry started, once, with the credentials of the upload. Errors are ignored:
        registries expire unfinished uploads."""
        request = self.request("DELETE", repository, response.headers.get("Location", ""), "cancel an upload")
        with suppress(TransientError, LaunchError):
            self.http.send(request, self._auth.header(request.scopes, self.describe(request)))

    # --- Requests -----------------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        repository: str,
        path: str,
        what: str,
        right: Literal["pull", "pull,push"] = "pull,push",
        *,
        headers: Mapping[str, str] | None = None,
        params: tuple[tuple[str, str], ...] = (),
        body: bytes | BlobRange = b"",
        reads: str = "",
    ) -> Request:
        """Return a request of `repository`: to a path in it, or to the URL of a Location header.

        `right` is what it takes in the repository; `reads` is another repository to pull from.
        """
        is_read = right == "pull"
        scopes = [f"repository:{repository}:{right}"] + [f"repository:{reads}:pull"] * bool(reads)
        accept = {"Accept": ", ".join(ACCEPTED)} if path.startswith("manifests/") and is_read else {}
        url, stream = self.url(path, repository), is_read and method == "GET"
        return Request(what, method, url, repository, tuple(scopes), headers or accept, params, body, stream)

    def url(self, path: str, repository: str = "") -> str:
        """Return the URL of a path in a repository, or of a Location header.

        Behind a proxy that terminates TLS, a registry may return its own address with http:. It gets the original
        scheme.

        Raises:
            RegistryError: it is on another host, without TLS.
        """
        url = urljoin(f"{self._root}/v2/{repository}/", path)
        if self._is_ours(url):
            return urlsplit(url)._replace(scheme=urlsplit(self._root).scheme).geturl()
        return self.http.allowed(url)

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self._root).netloc

    def _do(self, request: Request) -> Response:
        """Return the response, with retries. Raises NotAuthorised, RegistryError: all tries failed."""
        return self._retried(request, lambda response: response)

    def _retried(self, request: Request, read: Callable[[Response], T]) -> T:
        """Send a request until `read` can make its result of the response, complete and undamaged; return that."""
        tries = self.http.tries(self.describe(request))
        while True:
            try:
                return read(self.once(request))
            except TransientError as error:
                tries.wait(error)

    def once(self, request: Request) -> Response:
        """Send a request once, and again after renewing refused credentials.

        Raises:
            TransientError: no response, or a transient failure.
        """
        ours = self._is_ours(request.url)
        header = self._auth.header(request.scopes, self.describe(request)) if ours else None
        for refused in count():
            response = self.http.send(request, header)
            if response.status_code != 401 or not ours or not self._is_ours(str(response.url)):
                break  # the registry's credentials are never sent to a host that it redirects to
            header = self._auth.renew(request.scopes, response, header, first=refused == 0, what=self.describe(request))
        raise_if_transient(response)
        return response

    def _expect(self, response: Response, request: Request, status: int) -> None:
        if response.status_code != status:
            raise self.refusal(response, request)

    def refusal(self, response: Response, request: Request) -> LaunchError:
        """Return the error for a refusal."""
        return refusal(response, self.host, request.repository, request.what, self._auth.tried())

    def describe(self, request: Request) -> str:
        """Return the operation and the repository, for an error."""
        return f"{self.host}/{request.repository}: {request.what}"


def blob_digest(raw: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of bytes, as in references."""
    return f"{algorithm}:{hashlib.new(algorithm, raw).hexdigest()}"


def _verified(raw: bytes, digest: str | None) -> str:
    """Return the digest of `raw`. Raises TransientError: it is not `digest`, so the bytes were damaged in transit."""
    actual = blob_digest(raw, digest.partition(":")[0] if digest else "sha256")
    if digest and actual != digest:
        raise TransientError(f"damaged: it has the digest {actual}, and should have {digest}")
    return actual


class Upload:
    """The upload of one blob: started by a POST, sent by PATCHes and completed by a PUT, or sent by the PUT alone.

    After a failure, the registry is first asked whether the blob exists, because only the last response may have been
    lost. Then it is asked how many bytes it has, and the upload resumes from there, or restarts if the registry does
    not know. Docker's registry 2.8 knows only between two pieces:
    https://github.com/distribution/distribution/pull/3755.
    """

    def __init__(
        self,
        registry: Registry,
        repository: str,
        digest: str,
        size: int,
        open_blob: Callable[[], BinaryIO],
        on_bytes: Callable[[int], None],
    ) -> None:
        self._registry = registry
        self._repository = repository
        self._digest = digest
        self._size = size
        self._open = open_blob
        self._chunk = registry.chunk if size > SINGLE else None
        self._on_bytes = on_bytes
        self._location: str | None = None
        self._offset = 0
        self._furthest = 0
        self._damaged = False
        self._tries = registry.http.tries(registry.describe(self._request("POST", "blobs/uploads/")))

    def run(self) -> None:
        """Upload the blob. Raises as `Registry.upload` does."""
        broken = False
        while True:
            try:
                if broken:
                    if self._registry.once(self._request("HEAD", f"blobs/{self._digest}")).status_code == 200:
                        break
                    self._find_offset()
                    broken = False
                if self._location is None:
                    self._begin()
                while self._chunk and self._offset < self._size:
                    self._send_piece(min(self._chunk, self._size - self._offset))
                self._finish()
                break
            except TransientError as error:
                broken = True
                self._tries.wait(error)
        self._on_bytes(self._size)

    def _begin(self) -> None:
        request = self._request("POST", "blobs/uploads/")
        response = self._registry.once(request)
        if response.status_code not in (201, 202):
            raise self._registry.refusal(response, request)
        self._moved(response)
        self._reached(0)

    def _send_piece(self, size: int) -> None:
        """Send one piece.

        The registry reports how many bytes it has; without a report it has all of them. If it does not support pieces,
        the blob is sent as a whole.
        """
        first = self._offset
        response = self._answer("PATCH", size, {"Content-Range": f"{first}-{first + size - 1}"})
        self._moved(response)
        reached = _received(response) or first + size
        if not first < reached <= first + size:
            raise TransientError(f"the registry has {reached} bytes, after {first} and a piece of {size}")
        self._reached(reached)

    def _finish(self) -> None:
        """Complete the upload, with the bytes that are not yet sent."""
        response = self._answer("PUT", self._size - self._offset, params=(("digest", self._digest),))
        stored = response.headers.get("Docker-Content-Digest", self._digest)
        if stored != self._digest:
            raise RegistryError(f"{self._tries.what}: the registry stored {stored}")

    def _answer(
        self,
        method: str,
        size: int,
        headers: Mapping[str, str] | None = None,
        params: tuple[tuple[str, str], ...] = (),
    ) -> Response:
        """Send the next `size` bytes, and return a successful response.

        Raises TransientError: the upload is at another position, or bytes were damaged."""
        body = BlobRange(self._open, self._offset, size, self._registry.http) if size else b""
        headers = {**(headers or {}), "Content-Type": "application/octet-stream"}
        request = self._request(method, self._location or "", headers=headers, params=params, body=body)
        response = self._registry.once(request)
        if is_success(response):
            return response
        problem = codes(response)
        if set(problem) & set(DAMAGED) and not self._damaged:
            self._damaged, self._location = True, None
        elif method == "PATCH" and (response.status_code in (405, 501) or "UNSUPPORTED" in problem):
            self._chunk, self._location = None, None
        elif response.status_code in FORGOTTEN and "NAME_UNKNOWN" not in problem:
            self._location = self._location if response.status_code == 416 else None
        else:
            raise self._registry.refusal(response, request)
        raise TransientError(registry_message(response))

    def _find_offset(self) -> None:
        """Ask the registry how many bytes it has. If it does not know, the upload restarts."""
        if self._location is None or self._chunk is None:
            self._location = None
            return
        response = self._registry.once(self._request("GET", self._location))
        reached = _received(response) if is_success(response) else None
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
        self._location = self._registry.url(location)

    def _reached(self, offset: int) -> None:
        """Store how many bytes the registry has. Progress that can't be lost resets the number of failed tries."""
        self._offset = offset
        if offset > self._furthest:
            self._furthest = offset
            self._tries.failed = 0
        self._on_bytes(offset)

    def _request(self, method: str, path: str, **more: Any) -> Request:
        return self._registry.request(method, self._repository, path, f"send {self._digest}", **more)


def _received(response: Response) -> int | None:
    """Return the number of bytes that an upload has, from a response's Range header. None: unknown.

    "0-0" stands for both zero bytes and one byte.
    """
    match = re.fullmatch(r"(?:bytes=)?0-(\d+)", response.headers.get("Range", ""))
    return int(match[1]) + 1 if match and match[1] != "0" else None
