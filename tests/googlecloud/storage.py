"""Cloud Storage's JSON API: objects with generations and preconditions, listing by prefix, downloads, buckets."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from typing import Any
from urllib.parse import quote

import google_crc32c

from tests.googlecloud.errors import ApiError
from tests.googlecloud.wire import Request, Response, Route, json_response, page, route

BUCKET = "/storage/v1/b/{bucket}"
OBJECT = BUCKET + "/o/{name}"
PRECONDITIONS = ("ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch")


@dataclass(frozen=True)
class Blob:
    """One generation of an object. `updated` is in Unix seconds."""

    name: str
    data: bytes
    generation: int
    updated: float
    content_type: str = "application/octet-stream"
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def crc32c(self) -> str:
        """Base64 of the big-endian CRC32C, as Google writes it."""
        return base64.b64encode(google_crc32c.value(self.data).to_bytes(4)).decode()

    @property
    def md5(self) -> str:
        """Base64 of the MD5 digest."""
        return base64.b64encode(hashlib.md5(self.data, usedforsecurity=False).digest()).decode()


class Objects:
    """What is stored, in the buckets that exist. Each write is a new generation; the old one is gone."""

    def __init__(self, buckets: tuple[str, ...], clock: Callable[[], float]) -> None:
        self.buckets: dict[str, dict[str, Blob]] = {name: {} for name in buckets}
        self.clock = clock
        self._generations = count(1_700_000_000_000_001)

    def bucket(self, name: str) -> dict[str, Blob]:
        """A bucket's objects by name. Raises ApiError 404."""
        if name not in self.buckets:
            raise ApiError(404, "The specified bucket does not exist.", reason="notFound")
        return self.buckets[name]

    def find(self, bucket: str, name: str, query: Mapping[str, str]) -> Blob:
        """The object, if the request's preconditions hold. Raises ApiError 404 or 412."""
        blob = self.bucket(bucket).get(name)
        wanted = query.get("generation")
        if blob is None or (wanted and int(wanted) != blob.generation):
            raise ApiError(404, f"No such object: {bucket}/{name}", reason="notFound")
        check_preconditions(blob, query)
        return blob

    def write(self, bucket: str, name: str, data: bytes, given: Mapping[str, Any], query: Mapping[str, str]) -> Blob:
        """Store a new generation. `given` is the object's resource as the client sent it.

        Raises ApiError 400 (checksums), 404 (bucket) or 412 (preconditions): then nothing has changed.
        """
        objects = self.bucket(bucket)
        check_preconditions(objects.get(name), query)
        content_type = given.get("contentType") or "application/octet-stream"
        blob = Blob(name, data, next(self._generations), self.clock(), content_type, dict(given.get("metadata") or {}))
        _check_sums(blob, given)
        objects[name] = blob
        return blob


def check_preconditions(blob: Blob | None, query: Mapping[str, str]) -> None:
    """Raise ApiError 412 unless all of the request's ifGeneration… hold. An absent object has generation 0."""
    generation = blob.generation if blob else 0
    metageneration = 1 if blob else 0
    for name in PRECONDITIONS:
        if name in query:
            current = metageneration if "Meta" in name else generation
            if (int(query[name]) == current) == ("Not" in name):
                message = "At least one of the pre-conditions you specified did not hold."
                raise ApiError(412, message, reason="conditionNotMet")


def _check_sums(blob: Blob, given: Mapping[str, Any]) -> None:
    for name, key, actual in (("CRC32C", "crc32c", blob.crc32c), ("MD5", "md5Hash", blob.md5)):
        if key in given and given[key] != actual:
            message = f'Provided {name} "{given[key]}" doesn\'t match calculated {name} "{actual}".'
            raise ApiError(400, message, reason="invalid")


class Storage:
    """The service's reads and deletions; uploads are in `uploads`."""

    def __init__(self, objects: Objects, url: Callable[[], str]) -> None:
        self.objects = objects
        self.url = url
        self.routes: list[Route] = [
            route("GET", BUCKET, self.bucket),
            route("GET", BUCKET + "/o", self.list),
            route("GET", OBJECT, self.get),
            route("GET", "/download" + OBJECT, self.download),
            route("DELETE", OBJECT, self.delete),
        ]

    def resource(self, bucket: str, blob: Blob) -> dict[str, Any]:
        """The object as the API shows it; int64 values are text there."""
        at = datetime.fromtimestamp(blob.updated, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
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
            "md5Hash": blob.md5,
            "crc32c": blob.crc32c,
            "etag": f"etag-{blob.generation}",
            "timeCreated": at,
            "updated": at,
            **({"metadata": dict(blob.metadata)} if blob.metadata else {}),
        }

    def bucket(self, request: Request, bucket: str) -> Response:
        """One bucket."""
        request.only_query()
        self.objects.bucket(bucket)
        known = {"kind": "storage#bucket", "id": bucket, "name": bucket, "location": "US-CENTRAL1"}
        return json_response({**known, "storageClass": "STANDARD", "locationType": "region"})

    def list(self, request: Request, bucket: str) -> Response:
        """A page of names and, with a delimiter, of the folders below the prefix, in the order of their bytes."""
        query = request.query
        request.only_query("prefix", "delimiter", "maxResults", "pageToken", "startOffset", "versions", *LISTING)
        prefix, start = query.get("prefix", ""), query.get("startOffset", "")
        blobs = sorted(self.objects.bucket(bucket).values(), key=lambda blob: blob.name.encode())
        found = [blob for blob in blobs if blob.name.startswith(prefix) and blob.name >= start]
        entries = _folded(found, prefix, query.get("delimiter", ""))
        items, following = page(entries, int(query.get("maxResults", 1000)), query.get("pageToken", ""))
        answer: dict[str, Any] = {"kind": "storage#objects", "prefixes": [e for e in items if isinstance(e, str)]}
        answer["items"] = [self.resource(bucket, e) for e in items if isinstance(e, Blob)]
        return json_response({**answer, **({"nextPageToken": following} if following else {})})

    def get(self, request: Request, bucket: str, name: str) -> Response:
        """An object's resource, or with alt=media its bytes."""
        if request.query.get("alt") == "media":
            return self.download(request, bucket, name)
        request.only_query("generation", *PRECONDITIONS)
        return json_response(self.resource(bucket, self.objects.find(bucket, name, request.query)))

    def download(self, request: Request, bucket: str, name: str) -> Response:
        """An object's bytes, all or a range of them."""
        request.only_query("generation", *PRECONDITIONS)
        blob = self.objects.find(bucket, name, request.query)
        headers = {
            "Content-Type": blob.content_type,
            "ETag": f"etag-{blob.generation}",
            "X-Goog-Generation": str(blob.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": f"crc32c={blob.crc32c},md5={blob.md5}",
        }
        return _ranged(blob.data, request.headers.get("range", ""), headers)

    def delete(self, request: Request, bucket: str, name: str) -> Response:
        """Remove an object."""
        request.only_query("generation", *PRECONDITIONS)
        self.objects.find(bucket, name, request.query)
        del self.objects.bucket(bucket)[name]
        return Response(status=204)


LISTING = ("includeTrailingDelimiter", "includeFoldersAsPrefixes", "softDeleted")


def _folded(blobs: list[Blob], prefix: str, delimiter: str) -> list[Blob | str]:
    """Objects, those with `delimiter` after the prefix folded into one text for each folder."""
    if not delimiter:
        return [*blobs]
    entries: list[Blob | str] = []
    for blob in blobs:
        head, found, _ = blob.name[len(prefix) :].partition(delimiter)
        entry = prefix + head + delimiter if found else blob
        if entry not in entries[-1:]:
            entries.append(entry)
    return entries


def _ranged(data: bytes, wanted: str, headers: dict[str, str]) -> Response:
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted)
    if not match:
        return Response(data, headers=headers)
    first, last = int(match[1]), min(int(match[2] or len(data) - 1), len(data) - 1)
    if first >= len(data):
        raise ApiError(416, "The requested range cannot be satisfied.", reason="requestedRangeNotSatisfiable")
    span = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
    return Response(data[first : last + 1], 206, {**headers, **span})
