"""Cloud Storage's three ways to upload: media, multipart and resumable (what clients use above 8 MiB)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.googlecloud.errors import ApiError
from tests.googlecloud.storage import PRECONDITIONS, Objects, Storage
from tests.googlecloud.wire import Request, Response, Route, json_response, route

UPLOAD = "/upload/storage/v1/b/{bucket}/o"


@dataclass
class Session:
    """A resumable upload that has begun."""

    bucket: str
    name: str
    given: Mapping[str, Any]
    query: Mapping[str, str]
    data: bytearray = field(default_factory=bytearray)


class Uploads:
    """The service's writes."""

    def __init__(self, objects: Objects, storage: Storage, url: Callable[[], str]) -> None:
        self.objects = objects
        self.storage = storage
        self.url = url
        self.sessions: dict[str, Session] = {}
        self._ids = count(1)
        self.routes: list[Route] = [route("POST", UPLOAD, self.upload), route("PUT", UPLOAD, self.resume)]

    def upload(self, request: Request, bucket: str) -> Response:
        """Begin, and for all but a resumable upload also end, an upload."""
        request.only_query("uploadType", "name", "contentEncoding", *PRECONDITIONS)
        kind = request.query.get("uploadType")
        if kind == "resumable":
            return self._begin(request, bucket)
        if kind == "multipart":
            given, data = _multipart(request)
        elif kind == "media":
            given, data = {"contentType": request.headers.get("content-type")}, request.body
        else:
            raise ApiError(400, f"Invalid upload type: {kind}", reason="invalid")
        return self._store(bucket, _name(request, given), data, given, request.query)

    def resume(self, request: Request, bucket: str) -> Response:
        """One chunk of a resumable upload, or (with no bytes) the question how far it got."""
        session = self.sessions.get(request.query.get("upload_id", ""))
        if session is None or session.bucket != bucket:
            raise ApiError(404, "No such upload.", reason="notFound")
        first, total = _content_range(request)
        if first is not None:
            if first > len(session.data):
                raise ApiError(503, "The chunk does not follow the bytes received so far.", reason="backendError")
            session.data[first:] = request.body
        if total is None or len(session.data) < total:
            received = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
            return Response(status=308, headers=received)
        response = self._store(bucket, session.name, bytes(session.data), session.given, session.query)
        del self.sessions[request.query["upload_id"]]
        return response

    def _begin(self, request: Request, bucket: str) -> Response:
        self.objects.bucket(bucket)
        given = request.json() if request.body else {}
        given.setdefault("contentType", request.headers.get("x-upload-content-type"))
        upload_id = f"upload-{next(self._ids)}"
        self.sessions[upload_id] = Session(bucket, _name(request, given), given, dict(request.query))
        place = f"{self.url()}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
        return Response(headers={"Location": place, "X-GUploader-UploadID": upload_id})

    def _store(
        self, bucket: str, name: str, data: bytes, given: Mapping[str, Any], query: Mapping[str, str]
    ) -> Response:
        blob = self.objects.write(bucket, name, data, given, query)
        return json_response(self.storage.resource(bucket, blob))


def _name(request: Request, given: Mapping[str, Any]) -> str:
    name = given.get("name") or request.query.get("name")
    if not name:
        raise ApiError(400, "Required parameter: name", reason="required")
    return str(name)


def _multipart(request: Request) -> tuple[dict[str, Any], bytes]:
    """The JSON and the bytes of a multipart/related body (RFC 2387); the bytes may hold anything."""
    boundary = re.search(r"""boundary=["']?([^"';]+)""", request.headers.get("content-type", ""))
    parts = request.body.split(b"--" + boundary[1].encode()) if boundary else []
    if len(parts) != 4 or not parts[3].startswith(b"--"):
        raise ApiError(400, "Malformed multipart body.", reason="badContent")
    given = json.loads(_part(parts[1])[1])
    media_type, data = _part(parts[2])
    return {"contentType": media_type, **given}, data


def _part(part: bytes) -> tuple[str, bytes]:
    """Content type and bytes of one part: a line end, headers, an empty line, the bytes, a line end.

    gcloud ends its lines with LF alone.
    """
    end = b"\r\n" if part.startswith(b"\r\n") else b"\n"
    head, _, data = part.partition(end + end)
    media_type = re.search(rb"(?im)^content-type:\s*(.+?)\r?$", head)
    return media_type[1].decode() if media_type else "", data.removesuffix(end)


def _content_range(request: Request) -> tuple[int | None, int | None]:
    """First byte (None: no bytes in this request) and total size (None: not known yet)."""
    text = request.headers.get("content-range", "")
    match = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(?:\*|(\d+))", text)
    if not match:
        return 0, len(request.body)
    return (int(match[1]) if match[1] else None), (int(match[2]) if match[2] else None)
