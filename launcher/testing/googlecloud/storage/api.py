"""Cloud Storage's JSON API: buckets, lists, downloads, and uploads (media, multipart and resumable)."""

from __future__ import annotations

import base64
import json
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from urllib.parse import quote

from launcher.testing.googlecloud.project.iam import Policies
from launcher.testing.googlecloud.storage.objects import PRECONDITIONS, Blob, Bucket, Objects, draft
from launcher.testing.googlecloud.wire import (
    ApiError,
    Request,
    Response,
    Target,
    json_response,
    new_route,
    page_step,
    route,
    utc,
)

BUCKETS = "/storage/v1/b"
BUCKET = BUCKETS + "/{bucket}"
OBJECT = BUCKET + "/o/{name}"
PAGE = 1000
"""Objects per page: the maximum and the default."""
READING = ("generation", *PRECONDITIONS)
LISTING = ("includeTrailingDelimiter", "includeFoldersAsPrefixes", "softDeleted", "versions")


def _prefix(request: Request, bucket: str) -> Target:
    return Target(request.query.get("prefix", ""), page_step(request))


def _shown(request: Request, bucket: str, name: str) -> Target:
    return Target(name, "media" if request.query.get("alt") == "media" else "metadata")


def _bytes(request: Request, bucket: str, name: str) -> Target:
    return Target(name, "media")


class Storage:
    """The service's reads and deletions."""

    def __init__(self, objects: Objects, number: str, url: Callable[[], str], policies: Policies) -> None:
        self.objects = objects
        self.number = number
        self.url = url
        self.policies = policies
        self._created = objects.clock()

    def resource(self, bucket: str, blob: Blob) -> dict[str, Any]:
        """Return the object's resource. int64 values are strings in the API."""
        at = _timestamp(blob.updated)
        place = f"b/{bucket}/o/{quote(blob.name, safe='')}"
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{blob.name}/{blob.generation}",
            "selfLink": f"{self.url()}/storage/v1/{place}",
            "mediaLink": f"{self.url()}/download/storage/v1/{place}?generation={blob.generation}&alt=media",
            "name": blob.name,
            "bucket": bucket,
            "generation": str(blob.generation),
            "metageneration": "1",
            "contentType": blob.content_type,
            "storageClass": "STANDARD",
            "size": str(len(blob.data)),
            "crc32c": blob.crc32c,
            "etag": f"etag-{blob.generation}",
            "timeCreated": at,
            "updated": at,
            **({"md5Hash": blob.md5} if blob.md5 else {}),
            **({"metadata": dict(blob.metadata)} if blob.metadata else {}),
        }

    @route("POST", BUCKETS, "storage.buckets.insert", query="project enableObjectRetention")
    def add(self, request: Request) -> Response:
        body = request.json()
        if unknown := {*body} - {"name", "location", "labels", "softDeletePolicy", "iamConfiguration"}:
            raise ApiError(400, f"The loopback cloud does not know {sorted(unknown)} in a bucket.")
        if body["name"] in self.objects.settings:
            message = "Your previous request to create the named bucket succeeded and you already own it."
            raise ApiError(409, message, reason="conflict")
        kept = int(body.get("softDeletePolicy", {}).get("retentionDurationSeconds", 604_800))
        labels = body.get("labels", {})
        self.objects.add(
            body["name"],
            Bucket(body["name"], body.get("location", "US"), kept, labels=labels, uniform=_uniform(body, False)),
        )
        return json_response(self._bucket(body["name"]))

    @route("GET", BUCKETS, "storage.buckets.list", query="project prefix maxResults pageToken")
    def buckets(self, request: Request) -> Response:
        names = [name for name in sorted(self.objects.settings) if name.startswith(request.query.get("prefix", ""))]
        return json_response({"kind": "storage#buckets", "items": [self._bucket(name) for name in names]})

    @route("DELETE", BUCKET, "storage.buckets.delete")
    def remove(self, request: Request, bucket: str) -> Response:
        """Delete a bucket. Raises ApiError 409: it is not empty."""
        self.objects.allow(bucket, "storage.buckets.delete")
        if self.objects.buckets[bucket]:
            raise ApiError(409, "The bucket you tried to delete is not empty.", reason="conflict")
        self.objects.remove(bucket)
        return Response(status=204)

    @route("GET", BUCKET, "storage.buckets.get")
    def bucket(self, request: Request, bucket: str) -> Response:
        self.objects.allow(bucket, "storage.buckets.get")
        return json_response(self._bucket(bucket))

    @route("PATCH", BUCKET, "storage.buckets.patch", query="projection")
    def patch(self, request: Request, bucket: str) -> Response:
        settings, body = self.objects.allow(bucket, "storage.buckets.update"), request.json()
        if unknown := {*body} - {"softDeletePolicy", "iamConfiguration"}:
            raise ApiError(400, f"The loopback cloud does not know {sorted(unknown)} in a bucket.")
        kept = int(body.get("softDeletePolicy", {}).get("retentionDurationSeconds", settings.soft_delete_seconds))
        uniform = _uniform(body, settings.uniform)
        self.objects.settings[bucket] = replace(settings, soft_delete_seconds=kept, uniform=uniform)
        return json_response(self._bucket(bucket))

    @route("GET", BUCKET + "/iam", "storage.buckets.getIamPolicy", query="optionsRequestedPolicyVersion")
    def policy(self, request: Request, bucket: str) -> Response:
        self.objects.allow(bucket, "storage.buckets.getIamPolicy")
        return json_response({"kind": "storage#policy", **self.policies.get(f"buckets/{bucket}")})

    @route("PUT", BUCKET + "/iam", "storage.buckets.setIamPolicy")
    def set_policy(self, request: Request, bucket: str) -> Response:
        """Replace a bucket's policy. Raises ApiError 412: it has changed."""
        self.objects.allow(bucket, "storage.buckets.setIamPolicy")
        return json_response(self.policies.set(f"buckets/{bucket}", request.json(), stale=412))

    @route("GET", BUCKET + "/iam/testPermissions", "storage.buckets.testIamPermissions", query="permissions")
    def tested(self, request: Request, bucket: str) -> Response:
        denied = self.objects.allow(bucket, "").denied
        have = [name for name in request.query.get("permissions", "").split(",") if name not in denied]
        return json_response({"kind": "storage#testIamPermissionsResponse", "permissions": have})

    def _bucket(self, bucket: str) -> dict[str, Any]:
        settings = self.objects.settings[bucket]
        known = {"kind": "storage#bucket", "id": bucket, "name": bucket, "storageClass": "STANDARD"}
        place = {"location": settings.location.upper(), "locationType": _location_type(settings.location)}
        owner = {"projectNumber": settings.project_number or self.number}
        labels = {"labels": dict(settings.labels)} if settings.labels else {}
        return {
            **known,
            **owner,
            **place,
            **labels,
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": settings.uniform}},
            "softDeletePolicy": self._soft_delete(settings),
        }

    @route(
        "GET",
        BUCKET + "/o",
        "storage.objects.list",
        query=("prefix", "delimiter", "maxResults", "pageToken", "startOffset", *LISTING),
        target=_prefix,
    )
    def list(self, request: Request, bucket: str) -> Response:
        query = request.query
        if query.get("softDeleted", "false").lower() != "false":  # no bucket here is versioned
            raise ApiError(400, "The loopback cloud doesn't list soft-deleted objects.")
        prefix, start = query.get("prefix", ""), query.get("startOffset", "")
        blobs = [b for b in self.objects.listed(bucket) if b.name.startswith(prefix) and b.name >= start]
        entries = _folded(blobs, prefix, query.get("delimiter", ""))
        items, following = _page(entries, min(int(query.get("maxResults", PAGE)), PAGE), query.get("pageToken", ""))
        answer: dict[str, Any] = {"kind": "storage#objects", "prefixes": [e for e in items if isinstance(e, str)]}
        answer["items"] = [self.resource(bucket, e) for e in items if isinstance(e, Blob)]
        return json_response({**answer, **({"nextPageToken": following} if following else {})})

    @route("GET", OBJECT, "storage.objects.get", query=READING, target=_shown)
    def get(self, request: Request, bucket: str, name: str) -> Response:
        if request.query.get("alt") == "media":
            return self.download(request, bucket, name)
        return json_response(self.resource(bucket, self.objects.find(bucket, name, request.query)))

    @route("GET", "/download" + OBJECT, "storage.objects.get", query=READING, target=_bytes)
    def download(self, request: Request, bucket: str, name: str) -> Response:
        blob = self.objects.find(bucket, name, request.query)
        headers = {
            "Content-Type": blob.content_type,
            "ETag": f"etag-{blob.generation}",
            "X-Goog-Generation": str(blob.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": f"crc32c={blob.crc32c}" + (f",md5={blob.md5}" if blob.md5 else ""),
        }
        return _ranged(blob.data, request.headers.get("range", ""), headers)

    @route("DELETE", OBJECT, "storage.objects.delete", query=READING)
    def delete(self, request: Request, bucket: str, name: str) -> Response:
        self.objects.delete(bucket, name, request.query)
        return Response(status=204)

    def _soft_delete(self, settings: Bucket) -> dict[str, str]:
        policy = {"retentionDurationSeconds": str(settings.soft_delete_seconds)}
        return {**policy, "effectiveTime": _timestamp(self._created)} if settings.soft_delete_seconds else policy


def _folded(blobs: list[Blob], prefix: str, delimiter: str) -> list[Blob | str]:
    """Replace the objects that have `delimiter` after the prefix by one string per folder."""
    if not delimiter:
        return [*blobs]
    entries: list[Blob | str] = []
    for blob in blobs:
        head, nested, _ = blob.name[len(prefix) :].partition(delimiter)
        entry = prefix + head + delimiter if nested else blob
        if entry not in entries[-1:]:
            entries.append(entry)
    return entries


def _page(entries: list[Blob | str], most: int, token: str) -> tuple[list[Blob | str], str]:
    """Return one page and the token of the next page.

    The token is the last name on the page, so that deletions between two pages hide nothing. Raises ApiError 400:
    unknown token.
    """
    try:
        seen = base64.urlsafe_b64decode(token).decode()
    except ValueError as error:
        raise ApiError(400, "Invalid page token.", reason="invalid") from error
    start = bisect_right(entries, seen, key=_entry_name) if token else 0
    items = entries[start : start + most]
    more = start + most < len(entries)
    return items, base64.urlsafe_b64encode(_entry_name(items[-1]).encode()).decode() if more else ""


def _entry_name(entry: Blob | str) -> str:
    return entry if isinstance(entry, str) else entry.name


def _ranged(data: bytes, wanted: str, headers: dict[str, str]) -> Response:
    """Return all of `data`, or the range of a Range header: first-last, first- or -count."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if not match or not any(match.groups()):
        return Response(data, headers=headers)
    whole = len(data)
    first = int(match[1]) if match[1] else max(whole - int(match[2]), 0)
    last = min(int(match[2]), whole - 1) if match[1] and match[2] else whole - 1
    if first > last:
        raise ApiError(416, "The requested range cannot be satisfied.", reason="requestedRangeNotSatisfiable")
    span = {"Content-Range": f"bytes {first}-{last}/{whole}"}
    return Response(data[first : last + 1], 206, {**headers, **span})


def _uniform(body: Mapping[str, Any], otherwise: bool) -> bool:
    known = body.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {})
    return bool(known.get("enabled", otherwise))


def _location_type(location: str) -> str:
    """Return a location's type: US and EU are multi-regions, NAM4 is a dual-region, US-CENTRAL1 is a region."""
    if location.upper() in ("US", "EU", "ASIA"):
        return "multi-region"
    return "region" if "-" in location else "dual-region"


def _timestamp(seconds: float) -> str:
    return utc(seconds).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
    data: bytearray = field(default_factory=bytearray)
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
        return self._store(bucket, draft(_name(request, resource), data, resource), request.query)

    def resume(self, request: Request, bucket: str) -> Response:
        session = self._session(request, bucket)
        with session.lock:
            if session.stored is None:
                session.stored = self._receive(session, request)
            received = {"Range": f"bytes=0-{len(session.data) - 1}"} if session.data else {}
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
        if first is not None:
            if first > len(session.data):
                raise ApiError(503, "The chunk does not follow the bytes received so far.", reason="backendError")
            session.data[first:] = request.body
        if total is None or len(session.data) < total:
            return None
        keys = {"crc32c": "crc32c", "md5": "md5Hash"}  # in the last chunk's X-Goog-Hash and in an object's resource
        pairs = (pair.strip().partition("=") for pair in request.headers.get("x-goog-hash", "").split(","))
        metadata = {**session.resource, **{keys[kind]: value for kind, _, value in pairs if kind in keys}}
        blob = draft(session.name, bytes(session.data), metadata, with_md5=session.with_md5)
        response = self._store(session.bucket, blob, session.query)
        session.data = bytearray()  # the object has the bytes now
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
