"""A client of one registry: the part of the OCI distribution API that appending a layer and pushing it need.

The client library oras-py is not used. Importing it takes 1.1 s, while a complete "nothing to do" takes 0.5 s. It also
can't mount blobs across repositories.
https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, Self, TypeVar
from urllib.parse import urljoin, urlsplit

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError
from launcher.images.reference import HUB, is_digest, scheme
from launcher.images.registry.credentials import Auth
from launcher.images.registry.transport import (
    JITTER,
    BlobBody,
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

FORGOTTEN: Final = (404, 410)
"""Statuses of a registry that no longer knows an upload."""

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
    ) -> None:
        """Raises LaunchError: the extra `docker` is not installed."""
        self.host = host
        self.http = Http(host, clock, jitter)
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
        """Upload a blob in one request. The caller checks first that the repository does not have it.

        Not in pieces, which could be resumed: Artifact Registry "does not support Docker chunked uploads"
        (https://cloud.google.com/artifact-registry/docs/reference/docker-api, read in 2026). After a failure, the
        registry is first asked whether it has the blob, because only the last response may have been lost.
        `open_blob` opens the `size` bytes at their start, once for each try. `on_bytes` receives the number of bytes
        that the registry has: 0 at the start of each try, `size` at the end.
        """
        what, is_broken, was_damaged = f"send {digest}", False, False
        begin = self.request("POST", repository, "blobs/uploads/", what)
        look = self.request("HEAD", repository, f"blobs/{digest}", what)
        tries = self.http.tries(self.describe(begin))
        while True:
            try:
                if is_broken and self.once(look).status_code == 200:
                    break
                on_bytes(0)
                response = self.once(begin)
                self._expect(response, begin, 202)
                if not (location := response.headers.get("Location")):
                    raise RegistryError(f"{tries.what}: the registry returned no upload URL")
                put = self.request(
                    "PUT",
                    repository,
                    location,
                    what,
                    headers={"Content-Type": "application/octet-stream"},
                    params=(("digest", digest),),
                    body=BlobBody(open_blob, size, self.http) if size else b"",
                )
                response = self.once(put)
                if is_success(response):
                    if (stored := response.headers.get("Docker-Content-Digest", digest)) != digest:
                        raise RegistryError(f"{tries.what}: the registry stored {stored}")
                    break
                problem = {*codes(response)}
                is_damaged = not was_damaged and not problem.isdisjoint(DAMAGED)
                was_damaged = was_damaged or is_damaged
                if not (is_damaged or (response.status_code in FORGOTTEN and "NAME_UNKNOWN" not in problem)):
                    raise self.refusal(response, put)
                raise TransientError(registry_message(response))
            except TransientError as error:
                is_broken = True
                tries.wait(error)
        on_bytes(size)

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
        body: bytes | BlobBody = b"",
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

        Raises RegistryError: it is on another host, without TLS.
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

        Raises TransientError: no response, or a transient failure.
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
        return refusal(response, self.host, request.repository, request.what, self._auth.tried())

    def describe(self, request: Request) -> str:
        """Return the operation and the repository, for an error."""
        return f"{self.host}/{request.repository}: {request.what}"


def blob_digest(raw: bytes, algorithm: str = "sha256") -> str:
    return f"{algorithm}:{hashlib.new(algorithm, raw).hexdigest()}"


def _verified(raw: bytes, digest: str | None) -> str:
    """Return the digest of `raw`. Raises TransientError: it is not `digest`, so the bytes were damaged in transit."""
    actual = blob_digest(raw, digest.partition(":")[0] if digest else "sha256")
    if digest and actual != digest:
        raise TransientError(f"damaged: it has the digest {actual}, and should have {digest}")
    return actual
