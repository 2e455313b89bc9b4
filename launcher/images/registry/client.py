"""A client of one registry: the part of the OCI distribution API that appending a layer and pushing it need.

The client library oras-py is not used. Importing it takes 1.1 s, while a complete "nothing to do" takes 0.5 s. It also
can neither mount blobs across repositories nor resume an interrupted upload.
https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TypeVar

from launcher.clock import REAL, Clock
from launcher.images.registry.errors import RegistryError, done
from launcher.images.registry.http import Ask
from launcher.images.registry.reference import is_digest, is_googles
from launcher.images.registry.retry import RetryPolicy, TransientError
from launcher.images.registry.session import RegistryCall, Wire, may_pull, may_push
from launcher.images.registry.upload import CHUNK, Blob, Upload

if TYPE_CHECKING:
    from types import TracebackType

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

T = TypeVar("T")

Heard = Callable[[int], None]


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
        found = response.headers.get("Docker-Content-Digest")
        if found and is_digest(found):
            return str(found)
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
            raw = self._whole(response, call)
            said = response.headers.get("Docker-Content-Digest", "")
            digest = reference if ":" in reference else said if is_digest(said) else None
            return self._understood(raw, _checked(raw, digest), response, call)

        return self._again(call, read)

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a small blob, such as an image's config, after verifying its digest."""
        call = self._reading("GET", repository, f"blobs/{digest}", f"read {digest}")

        def read() -> bytes:
            response = self._wire.once(call)
            self._expect(response, call, 200)
            raw = self._whole(response, call)
            _checked(raw, digest)
            return raw

        return self._again(call, read)

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
        ask = Ask("POST", self._wire.url(f"/v2/{repository}/blobs/uploads/"), params=params)
        scopes = (may_push(repository), may_pull(source))
        call = RegistryCall(f"mount {digest} from {source}", repository, scopes, ask)
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
        ask = Ask("POST", self._wire.url(f"/v2/{repository}/blobs/uploads/"))
        call = RegistryCall("begin an upload", repository, (may_push(repository),), ask)
        response = self._wire.do(call)
        self._expect(response, call, 202)
        self._cancel(repository, response)

    def upload(
        self,
        repository: str,
        digest: str,
        size: int,
        open: Callable[[], BinaryIO],  # noqa: A002 - the parameter opens the blob
        on_bytes: Heard = lambda total: None,
    ) -> None:
        """Upload a blob. The caller checks first that the repository does not have it.

        `open` opens the `size` bytes at their start, once for each try. `on_bytes` receives the number of bytes that
        the registry has; the number falls if a part must be sent again.
        """
        Upload(self._wire, Blob(repository, digest, size, open), self._chunk, on_bytes).run()

    def put_manifest(self, repository: str, reference: str, raw: bytes, media_type: str) -> str:
        """Write a manifest to a tag or its digest, and return its digest. All of its blobs must exist."""
        url = self._wire.url(f"/v2/{repository}/manifests/{reference}")
        ask = Ask("PUT", url, {"Content-Type": media_type}, body=raw)
        call = RegistryCall(f"write {reference}", repository, (may_push(repository),), ask)
        digest = digest_of(raw)
        response = self._wire.do(call)
        if not done(response):
            if response.status_code not in (401, 403, 404) and self.head(repository, reference) == digest:
                return digest  # another launch, or a try with a lost answer, has written this immutable tag
            raise self._wire.refusal(call, response)
        said = response.headers.get("Docker-Content-Digest", digest)
        if said != digest:
            raise RegistryError(f"{self._wire.words(call)}: the registry stored {said} instead of {digest}")
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
        ask = Ask(method, self._wire.url(f"/v2/{repository}/{path}"), headers, stream=method == "GET")
        return RegistryCall(what, repository, (may_pull(repository),), ask)

    def _again(self, call: RegistryCall, read: Callable[[], T]) -> T:
        """Call `read` until its result is complete and undamaged, and return that."""
        tries = self._wire.policy.begin(self._wire.words(call))
        while True:
            try:
                return read()
            except TransientError as error:
                tries.wait(error)

    def _expect(self, response: Response, call: RegistryCall, status: int) -> None:
        if response.status_code != status:
            raise self._wire.refusal(call, response)

    def _whole(self, response: Response, call: RegistryCall) -> bytes:
        """Read the body of a response. Raises TransientError: it was cut off."""
        from requests.exceptions import RequestException

        pieces: list[bytes] = []
        try:
            for piece in response.iter_content(1 << 18):
                pieces.append(piece)
                if sum(map(len, pieces)) > LARGEST:
                    raise RegistryError(f"{self._wire.words(call)}: it is larger than {LARGEST >> 20} MiB")
        except RequestException as error:
            raise TransientError(f"the answer was cut off: {error}") from error
        finally:
            response.close()
        return b"".join(pieces)

    def _understood(self, raw: bytes, digest: str, response: Response, call: RegistryCall) -> Manifest:
        try:
            body = json.loads(raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise RegistryError(f"{self._wire.words(call)}: the registry's response is not a manifest")
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        return Manifest(digest, str(body.get("mediaType") or media_type), body, raw)

    def _cancel(self, repository: str, response: Response) -> None:
        """Cancel an upload that a registry started. Errors are ignored: registries expire unfinished uploads."""
        ask = Ask("DELETE", self._wire.url(response.headers.get("Location", "")))
        self._wire.unheeded(RegistryCall("cancel an upload", repository, (may_push(repository),), ask))


def digest_of(raw: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of bytes, as in references."""
    return f"{algorithm}:{hashlib.new(algorithm, raw).hexdigest()}"


def _checked(raw: bytes, digest: str | None) -> str:
    """Return the digest of `raw`. Raises TransientError: it is not `digest`, so the bytes were damaged in transit."""
    found = digest_of(raw, digest.partition(":")[0] if digest else "sha256")
    if digest and found != digest:
        raise TransientError(f"damaged: it has the digest {found}, and should have {digest}")
    return found
