"""Cloud Storage's uploads: media, multipart and resumable (which clients use above 8 MiB)."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from launcher.testing.googlecloud.storage.api import Storage
from launcher.testing.googlecloud.storage.objects import PRECONDITIONS, Blob, Objects, draft
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Target, json_response, new_route, route
from launcher.testing.pieces import Pieces, cut, size

UPLOAD = "/upload/storage/v1/b/{bucket}/o"
GCLOUDS_UPLOAD = "/resumable" + UPLOAD
"""The path of gcloud's resumable uploads. gcloud compares the stored object's MD5, so these objects have one."""
INSERT = "storage.objects.insert"
UPLOADING = ("uploadType", "name", "contentEncoding", *PRECONDITIONS)


@dataclass
class Session:
    """A resumable upload in progress. `stored` is the answer to its last chunk."""

    bucket: str
    name: str
    resource: Mapping[str, Any]
    query: Mapping[str, str]
    with_md5: bool
    data: Pieces = ()
    stored: Response | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def _begun(request: Request, bucket: str) -> Target:
    kind = request.query.get("uploadType")
    resource = _multipart(request)[0] if kind == "multipart" else {}
    if kind == "resumable":
        resource = request.json() if request.body else {}
    return Target(_name(request, resource), "begin" if kind == "resumable" else "whole")


class Uploads:
    """The service's uploads."""

    def __init__(self, objects: Objects, storage: Storage, url: Callable[[], str]) -> None:
        self.objects = objects
        self.storage = storage
        self.url = url
        self.sessions: dict[str, Session] = {}
        self._ids = count(1)
        self.more_routes = [
            new_route("PUT", UPLOAD, self.resume, INSERT, self._resumed),
            new_route("DELETE", UPLOAD, self.cancel, INSERT, self._resumed),
        ]

    @route("POST", UPLOAD, INSERT, query=UPLOADING, target=_begun)
    @route("POST", GCLOUDS_UPLOAD, INSERT, query=UPLOADING, target=_begun)
    def upload(self, request: Request, bucket: str) -> Response:
        kind = request.query.get("uploadType")
        if kind == "resumable":
            return self._begin(request, bucket)
        if kind == "multipart":
            resource, data = _multipart(request)
        elif kind == "media":
            resource, data = {"contentType": request.headers.get("content-type")}, request.body
        else:
            raise ApiError(400, f"Invalid upload type: {kind}", reason="invalid")
        self.objects.allow(bucket, "storage.objects.create")
        return self._store(bucket, draft(_name(request, resource), (data,), resource), request.query)

    def resume(self, request: Request, bucket: str) -> Response:
        session = self._session(request, bucket)
        with session.lock:
            if session.stored is None:
                session.stored = self._receive(session, request)
            received = {"Range": f"bytes=0-{size(session.data) - 1}"} if size(session.data) else {}
            return session.stored or Response(status=308, headers=received)

    def cancel(self, request: Request, bucket: str) -> Response:
        self._session(request, bucket)
        del self.sessions[request.query["upload_id"]]
        return Response(status=499)

    def _begin(self, request: Request, bucket: str) -> Response:
        self.objects.allow(bucket, "storage.objects.create")
        resource = request.json() if request.body else {}
        resource.setdefault("contentType", request.headers.get("x-upload-content-type"))
        upload_id = f"upload-{next(self._ids)}"
        self.sessions[upload_id] = Session(
            bucket, _name(request, resource), resource, dict(request.query), request.path.startswith("/resumable/")
        )
        place = f"{self.url()}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
        return Response(headers={"Location": place, "X-GUploader-UploadID": upload_id})

    def _session(self, request: Request, bucket: str) -> Session:
        session = self.sessions.get(request.query.get("upload_id", ""))
        if session is None or session.bucket != bucket:
            raise ApiError(404, "No such upload.", reason="notFound")
        return session

    def _receive(self, session: Session, request: Request) -> Response | None:
        """Accept a chunk. Return the answer if it was the last one."""
        first, total = _content_range(request)
        there = size(session.data)
        if first is not None:
            if first > there:
                raise ApiError(503, "The chunk does not follow the bytes received so far.", reason="backendError")
            before = session.data if first == there else cut(session.data, 0, first)
            session.data = (*before, request.body)
        if total is None or size(session.data) < total:
            return None
        data = tuple(bytes(piece) for piece in session.data)
        keys = {"crc32c": "crc32c", "md5": "md5Hash"}  # in the last chunk's X-Goog-Hash and in an object's resource
        pairs = (pair.strip().partition("=") for pair in request.headers.get("x-goog-hash", "").split(","))
        metadata = {**session.resource, **{keys[kind]: value for kind, _, value in pairs if kind in keys}}
        blob = draft(session.name, data, metadata, with_md5=session.with_md5)
        response = self._store(session.bucket, blob, session.query)
        session.data = ()  # the object has the bytes now
        return response

    def _store(self, bucket: str, blob: Blob, query: Mapping[str, str]) -> Response:
        return json_response(self.storage.resource(bucket, self.objects.write(bucket, blob, query)))

    def _resumed(self, request: Request, bucket: str) -> Target:
        session = self.sessions.get(request.query.get("upload_id", ""))
        put = "status" if _content_range(request)[0] is None else "chunk"
        return Target(session.name if session else "", "cancel" if request.method == "DELETE" else put)


def _name(request: Request, resource: Mapping[str, Any]) -> str:
    name = resource.get("name") or request.query.get("name")
    if not name:
        raise ApiError(400, "Required parameter: name", reason="required")
    return str(name)


def _multipart(request: Request) -> tuple[dict[str, Any], bytes]:
    """Return the JSON and the bytes of a multipart/related body (RFC 2387). The bytes may contain anything."""
    boundary = re.search(r"""boundary=["']?([^"';]+)""", request.headers.get("content-type", ""))
    parts = request.body.split(b"--" + boundary[1].encode()) if boundary else []
    if len(parts) != 4 or not parts[3].startswith(b"--"):
        raise ApiError(400, "Malformed multipart body.", reason="badContent")
    resource = json.loads(_part(parts[1])[1])
    media_type, data = _part(parts[2])
    return {"contentType": media_type, **resource}, data


def _part(part: bytes) -> tuple[str, bytes]:
    """Return the content type and bytes of one part: a line end, headers, an empty line, the bytes, a line end.

    gcloud ends its lines with LF only.
    """
    end = b"\r\n" if part.startswith(b"\r\n") else b"\n"
    head, _, data = part.partition(end + end)
    media_type = re.search(rb"(?im)^content-type:\s*(.+?)\r?$", head)
    return media_type[1].decode() if media_type else "", data.removesuffix(end)


def _content_range(request: Request) -> tuple[int | None, int | None]:
    """Return the first byte (None: no bytes in this request) and the total size (None: not known yet)."""
    text = request.headers.get("content-range", "")
    match = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(?:\*|(\d+))", text)
    if not match:
        return 0, int(request.headers.get("content-length", len(request.body)))
    return (int(match[1]) if match[1] else None), (int(match[2]) if match[2] else None)
