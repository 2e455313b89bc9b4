"""The OCI distribution API and its data: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from launcher.testing.httpserver import Response


class Recorded(NamedTuple):
    """One recorded request. `size` is the number of bytes of its body that were read."""

    step: str
    repository: str
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Request:
    """A request; header names are in lower case. `parse_path` sets `step`, `repository` and `name` (a digest, tag or
    upload)."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""
    step: str = ""
    repository: str = ""
    name: str = ""
    whole: bool = True
    """False: the connection ends after `body`, before the announced length."""

    def parameter(self, name: str) -> str:
        return parse_qs(self.query).get(name, [""])[0]

    def parameters(self, name: str) -> list[str]:
        return parse_qs(self.query).get(name, [])


class RefusedError(Exception):
    """An error of the distribution API."""

    def __init__(self, status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}")
        self.response = error(status, code, message, headers)


def error(status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response (https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes)."""
    body = {"errors": [{"code": code, "message": message or code.lower().replace("_", " "), "detail": {}}]}
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Response(json.dumps(body).encode(), status, {**kind, **(headers or {})})


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
IMAGES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


@dataclass
class Repository:
    """A repository: digests of its blobs, digest -> manifest (media type, bytes), tag -> digest."""

    blobs: set[str] = field(default_factory=set)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Store:
    """All repositories. `only`: the names (or prefixes of names, up to a slash) that exist; None: any. `absent` is
    called with repository and tag of a missing manifest, and may store it."""

    def __init__(self, only: frozenset[str] | None, *, immutable: bool) -> None:
        self.only = only
        self.immutable = immutable
        self.absent: Callable[[str, str], object] = lambda _name, _tag: None
        self.data: dict[str, bytes] = {}
        self._repositories: dict[str, Repository] = defaultdict(Repository)

    def repository(self, name: str) -> Repository:
        """Return a repository. Raises RefusedError: it does not exist and is not created by a push."""
        parts = name.split("/")
        known = {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        if self.only is not None and not known & self.only:
            raise RefusedError(404, "NAME_UNKNOWN", f'Repository "{name}" not found')
        return self._repositories[name]

    def add(self, name: str, data: bytes) -> str:
        """Store a blob in a repository, and return its digest."""
        blob_digest = digest(data)
        self.data[blob_digest] = data
        self.repository(name).blobs.add(blob_digest)
        return blob_digest

    def blob(self, name: str, wanted: str) -> bytes:
        """Return a blob's bytes. Raises RefusedError."""
        if wanted not in self.repository(name).blobs:
            raise RefusedError(404, "BLOB_UNKNOWN", "blob unknown to registry")
        return self.data[wanted]

    def manifest(self, name: str, reference: str) -> tuple[str, str, bytes]:
        """Return digest, media type and bytes of a manifest, by tag or digest. Raises RefusedError."""
        repository = self.repository(name)
        if reference not in repository.tags and ":" not in reference:
            self.absent(name, reference)
        found_digest = repository.tags.get(reference, reference)
        if found_digest not in repository.manifests:
            raise RefusedError(404, "MANIFEST_UNKNOWN", "manifest unknown")
        return found_digest, *repository.manifests[found_digest]

    def put(self, name: str, reference: str, media_type: str, raw: bytes) -> str:
        """Store a manifest, if everything that it references exists, and return its digest. Raises RefusedError."""
        repository, raw_digest = self.repository(name), digest(raw)
        self._check(repository, media_type, raw)
        if ":" in reference:
            if reference != raw_digest:
                raise RefusedError(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        elif self.immutable and repository.tags.get(reference, raw_digest) != raw_digest:
            raise RefusedError(400, "TAG_INVALID", "tag is immutable")
        else:
            repository.tags[reference] = raw_digest
        repository.manifests[raw_digest] = (media_type, raw)
        return raw_digest

    def _check(self, repository: Repository, media_type: str, raw: bytes) -> None:
        try:
            manifest = json.loads(raw)
            named = _named(manifest, media_type)
        except (ValueError, TypeError, KeyError) as error:
            raise RefusedError(400, "MANIFEST_INVALID", "manifest invalid") from error
        if manifest.get("mediaType", media_type) != media_type:
            raise RefusedError(400, "MANIFEST_INVALID", "media types differ")
        there = repository.manifests if media_type in INDEXES else repository.blobs
        for descriptor in named:
            if descriptor["digest"] not in there:
                raise RefusedError(400, "MANIFEST_BLOB_UNKNOWN", f"blob unknown to registry: {descriptor['digest']}")
            if descriptor["digest"] in self.data and len(self.data[descriptor["digest"]]) != descriptor["size"]:
                raise RefusedError(400, "SIZE_INVALID", f"{descriptor['digest']} has another size")


def _named(manifest: dict[str, Any], media_type: str) -> list[dict[str, Any]]:
    """Return the descriptors in a manifest. Raises ValueError, TypeError or KeyError: it is malformed."""
    if media_type in INDEXES:
        return list(manifest["manifests"])
    if media_type in IMAGES:
        return [manifest["config"], *manifest["layers"]]
    raise ValueError(media_type)


_PATH = re.compile(
    r"/v2/(?P<repository>.+)/(?P<kind>manifests|blobs/uploads|blobs|tags)/(?P<name>[^/]*)"
)  # greedy: a repository may be called a/blobs
STEPS = {
    ("manifests", "HEAD"): "manifest.head",
    ("manifests", "GET"): "manifest.get",
    ("manifests", "PUT"): "manifest.put",
    ("blobs", "HEAD"): "blob.head",
    ("blobs", "GET"): "blob.get",
    ("blobs/uploads", "POST"): "upload.begin",
    ("blobs/uploads", "PATCH"): "upload.chunk",
    ("blobs/uploads", "PUT"): "upload.finish",
    ("blobs/uploads", "DELETE"): "upload.cancel",
    ("tags", "GET"): "tags",
}


def parse_path(request: Request) -> Request:
    """Return the request with step, repository and name parsed from its path; an unknown path has an empty step."""
    if request.path in ("/v2/", "/v2", "/token"):
        return replace(request, step="token" if request.path == "/token" else "ping")
    match = _PATH.fullmatch(request.path)
    step = STEPS.get((match["kind"], request.method), "") if match else ""
    if not match or not step:
        return request
    step = "mount" if step == "upload.begin" and request.parameter("mount") else step
    return replace(request, step=step, repository=match["repository"], name=match["name"])


class Api:
    """Performs all steps. `redirects` is that of OciRegistry. `uploads` has the bytes of those in progress."""

    def __init__(self, store: Store, url: Callable[[], str], *, redirects: bool) -> None:
        self.store = store
        self.uploads: dict[str, bytes] = {}
        self._url = url
        self._redirects = redirects
        self._ids = count(1)
        self._steps: dict[str, Callable[[Request], Response]] = {
            "ping": lambda request: Response(),
            "tags": self._tags,
            "manifest.head": self._manifest,
            "manifest.get": self._manifest,
            "manifest.put": self._put,
            "blob.head": self._blob,
            "blob.get": self._blob,
            "mount": self._mount,
            "upload.begin": self._begin,
            "upload.chunk": self._chunk,
            "upload.finish": self._finish,
            "upload.cancel": self._cancel,
        }

    def answer(self, request: Request) -> Response:
        """Return the response. Raises RefusedError."""
        if request.step not in self._steps:
            raise RefusedError(404, "UNSUPPORTED", f"{request.method} {request.path}")
        return self._steps[request.step](request)

    def _tags(self, request: Request) -> Response:
        tags = sorted(self.store.repository(request.repository).tags)
        return Response(json.dumps({"tags": tags}).encode(), 200, {"Content-Type": "application/json"})

    def _manifest(self, request: Request) -> Response:
        manifest_digest, media_type, raw = self.store.manifest(request.repository, request.name)
        if media_type not in request.headers.get("accept", ""):
            raise RefusedError(404, "MANIFEST_UNKNOWN", f"it is a {media_type}, which Accept doesn't name")
        return Response(raw, 200, {"Content-Type": media_type, "Docker-Content-Digest": manifest_digest})

    def _put(self, request: Request) -> Response:
        media_type = request.headers.get("content-type", "")
        manifest_digest = self.store.put(request.repository, request.name, media_type, request.body)
        return Response(b"", 201, {"Docker-Content-Digest": manifest_digest, "Location": f"{request.path}"})

    def _blob(self, request: Request) -> Response:
        data = self.store.blob(request.repository, request.name)
        if self._redirects and not request.query:
            return Response(b"", 307, {"Location": f"{self._url()}{request.path}?elsewhere=1"})
        return Response(data, 200, {"Docker-Content-Digest": request.name, "Content-Type": "application/octet-stream"})

    def _mount(self, request: Request) -> Response:
        wanted = request.parameter("mount")
        try:
            data = self.store.blob(request.parameter("from"), wanted)
        except RefusedError:
            return self._begin(request)
        self.store.add(request.repository, data)
        place = f"{self._url()}/v2/{request.repository}/blobs/{wanted}"
        return Response(b"", 201, {"Location": place, "Docker-Content-Digest": wanted})

    def _begin(self, request: Request) -> Response:
        self.store.repository(request.repository)
        name = f"upload-{next(self._ids)}"
        return self._progress(replace(request, name=name), b"")

    def _chunk(self, request: Request) -> Response:
        """Append a request's body. Docker's engine sends a layer in one such request, without a Content-Range."""
        if "content-range" in request.headers:
            raise RefusedError(405, "UNSUPPORTED", "chunked uploads are not supported")
        return self._progress(request, self._upload(request) + request.body)

    def _progress(self, request: Request, data: bytes) -> Response:
        self.uploads[request.name] = data
        place = f"{self._url()}/v2/{request.repository}/blobs/uploads/{request.name}"
        return Response(b"", 202, {"Location": place, "Docker-Upload-UUID": request.name})

    def _finish(self, request: Request) -> Response:
        data, wanted = self._upload(request) + request.body, request.parameter("digest")
        if not request.whole:
            return Response()
        del self.uploads[request.name]
        if self.store.add(request.repository, data) != wanted:
            self.store.repository(request.repository).blobs.discard(wanted)
            raise RefusedError(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        place = f"{self._url()}/v2/{request.repository}/blobs/{wanted}"
        return Response(b"", 201, {"Location": place, "Docker-Content-Digest": wanted})

    def _cancel(self, request: Request) -> Response:
        self._upload(request)
        del self.uploads[request.name]
        return Response(status=204)

    def _upload(self, request: Request) -> bytes:
        if request.name not in self.uploads:
            raise RefusedError(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        return self.uploads[request.name]
