"""The OCI distribution API: https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from launcher.testing.registry.store import Store
from launcher.testing.registry.wire import RefusedError, Request, Response

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
    ("blobs/uploads", "GET"): "upload.status",
    ("blobs/uploads", "PUT"): "upload.finish",
    ("blobs/uploads", "DELETE"): "upload.cancel",
    ("tags", "GET"): "tags",
}


def parse_path(request: Request) -> Request:
    """Return the request with step, repository and name parsed from its path; an unknown path has an empty step."""
    if request.path in ("/v2/", "/v2", "/token"):
        return replace(request, step="token" if request.path == "/token" else "ping")
    found = _PATH.fullmatch(request.path)
    step = STEPS.get((found["kind"], request.method), "") if found else ""
    if not found or not step:
        return request
    step = "mount" if step == "upload.begin" and request.parameter("mount") else step
    return replace(request, step=step, repository=found["repository"], name=found["name"])


@dataclass
class Upload:
    """An upload in progress. `turn` counts the responses; Docker's registry encodes such a state in the Location."""

    repository: str
    data: bytearray = field(default_factory=bytearray)
    turn: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Api:
    """Performs all steps. `resumes`, `pieces` and `redirects` are those of OciRegistry."""

    def __init__(self, store: Store, url: Callable[[], str], *, resumes: bool, pieces: bool, redirects: bool) -> None:
        self.store = store
        self.uploads: dict[str, Upload] = {}
        self._url = url
        self._resumes = resumes
        self._pieces = pieces
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
            "upload.status": self._status,
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
        return Response(200, {"Content-Type": "application/json"}, json.dumps({"tags": tags}).encode())

    def _manifest(self, request: Request) -> Response:
        found, media_type, raw = self.store.manifest(request.repository, request.name)
        if media_type not in request.headers.get("accept", ""):
            raise RefusedError(404, "MANIFEST_UNKNOWN", f"it is a {media_type}, which Accept doesn't name")
        return Response(200, {"Content-Type": media_type, "Docker-Content-Digest": found}, raw)

    def _put(self, request: Request) -> Response:
        media_type = request.headers.get("content-type", "")
        found = self.store.put(request.repository, request.name, media_type, request.body)
        return Response(201, {"Docker-Content-Digest": found, "Location": f"{request.path}"})

    def _blob(self, request: Request) -> Response:
        data = self.store.blob(request.repository, request.name)
        if self._redirects and not request.query:
            return Response(307, {"Location": f"{self._url()}{request.path}?elsewhere=1"})
        return Response(200, {"Docker-Content-Digest": request.name, "Content-Type": "application/octet-stream"}, data)

    def _mount(self, request: Request) -> Response:
        wanted = request.parameter("mount")
        try:
            data = self.store.blob(request.parameter("from"), wanted)
        except RefusedError:
            return self._begin(request)
        self.store.add(request.repository, data)
        place = f"{self._url()}/v2/{request.repository}/blobs/{wanted}"
        return Response(201, {"Location": place, "Docker-Content-Digest": wanted})

    def _begin(self, request: Request) -> Response:
        self.store.repository(request.repository)
        name = f"upload-{next(self._ids)}"
        self.uploads[name] = Upload(request.repository)
        return self._progress(name, self.uploads[name], 202)

    def _chunk(self, request: Request) -> Response:
        if not self._pieces and "content-range" in request.headers:
            raise RefusedError(405, "UNSUPPORTED", "chunked uploads are not supported")
        upload = self._upload(request)
        with upload.lock:
            self._take(upload, request)
            return self._progress(request.name, upload, 202)

    def _status(self, request: Request) -> Response:
        return self._progress(request.name, self._upload(request), 204)

    def _finish(self, request: Request) -> Response:
        upload, wanted = self._upload(request), request.parameter("digest")
        with upload.lock:
            self._take(upload, request)
        del self.uploads[request.name]
        if not request.whole:
            return Response()
        if self.store.add(upload.repository, bytes(upload.data)) != wanted:
            self.store.repository(upload.repository).blobs.discard(wanted)
            raise RefusedError(400, "DIGEST_INVALID", "provided digest did not match uploaded content")
        place = f"{self._url()}/v2/{upload.repository}/blobs/{wanted}"
        return Response(201, {"Location": place, "Docker-Content-Digest": wanted})

    def _cancel(self, request: Request) -> Response:
        self._upload(request)
        del self.uploads[request.name]
        return Response(204)

    def _upload(self, request: Request) -> Upload:
        upload = self.uploads.get(request.name)
        outdated = upload and not self._resumes and request.parameter("turn") != str(upload.turn)
        if upload is None or upload.repository != request.repository or outdated:
            raise RefusedError(404, "BLOB_UPLOAD_UNKNOWN", "blob upload unknown to registry")
        return upload

    def _take(self, upload: Upload, request: Request) -> None:
        """Append a request's body. A chunk that does not begin at the end of the received data is refused (416)."""
        first = request.headers.get("content-range", "").partition("-")[0]
        if first and int(first) != len(upload.data):
            raise RefusedError(416, "BLOB_UPLOAD_INVALID", "the chunk does not follow the received data")
        upload.data += request.body
        if not self._resumes:
            upload.turn += 1

    def _progress(self, name: str, upload: Upload, status: int) -> Response:
        place = f"{self._url()}/v2/{upload.repository}/blobs/uploads/{name}"
        query = "" if self._resumes else f"?turn={upload.turn}"
        end = max(len(upload.data) - 1, 0)
        return Response(status, {"Location": place + query, "Range": f"0-{end}", "Docker-Upload-UUID": name})
