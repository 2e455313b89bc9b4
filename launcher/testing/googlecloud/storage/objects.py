"""Cloud Storage's data: buckets, and objects with generations, checksums and preconditions."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import google_crc32c

from launcher.testing.googlecloud.wire import ApiError

PRECONDITIONS = ("ifGenerationMatch", "ifGenerationNotMatch", "ifMetagenerationMatch", "ifMetagenerationNotMatch")
MD5_UP_TO = 1 << 20
"""Bytes. A larger object has an MD5 only if its client checks it, because hashing 2 GB takes longer than storing it."""

CALLER = "trainer@my-project.iam.gserviceaccount.com"


@dataclass(frozen=True)
class Bucket:
    """A bucket's settings. `denied` are permissions that the caller lacks, such as storage.objects.create.

    Deleted objects are kept and billed for `soft_delete_seconds`. A new bucket has 7 days; 0 is off
    (https://cloud.google.com/storage/docs/soft-delete).
    """

    name: str
    location: str = "US-CENTRAL1"
    soft_delete_seconds: int = 604_800
    denied: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    project_number: str = ""
    """The number of the owning project. Empty: the cloud's own."""
    uniform: bool = False
    """Uniform bucket-level access. Off in a bucket that was made without it."""


@dataclass(frozen=True)
class Blob:
    """One generation of an object. `updated` is in Unix seconds."""

    name: str
    data: bytes
    crc: int
    md5: str | None
    generation: int = 0
    updated: float = 0.0
    content_type: str = "application/octet-stream"
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def crc32c(self) -> str:
        """Return the CRC-32C as the API shows it: big-endian, in base64."""
        return base64.b64encode(self.crc.to_bytes(4)).decode()


def draft(name: str, data: bytes, resource: Mapping[str, Any], *, with_md5: bool = False) -> Blob:
    """Return an object to store. `resource` is its resource as the client sent it. Raises ApiError 400 (checksums)."""
    content_type = resource.get("contentType") or "application/octet-stream"
    with_md5 = with_md5 or "md5Hash" in resource or len(data) <= MD5_UP_TO
    md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode() if with_md5 else None
    metadata = dict(resource.get("metadata") or {})
    blob = Blob(name, data, google_crc32c.value(data), md5, content_type=content_type, metadata=metadata)
    for kind, key, actual in (("CRC32C", "crc32c", blob.crc32c), ("MD5", "md5Hash", md5)):
        if key in resource and resource[key] != actual:
            message = f'Provided {kind} "{resource[key]}" doesn\'t match calculated {kind} "{actual}".'
            raise ApiError(400, message, reason="invalid")
    return blob


class Objects:
    """The stored objects by bucket. Each write replaces the previous generation.

    It has its own lock, which is held for changes of state only. Bytes are read and hashed outside of it.
    """

    def __init__(self, buckets: Iterable[str | Bucket], clock: Callable[[], float]) -> None:
        known = [Bucket(bucket) if isinstance(bucket, str) else bucket for bucket in buckets]
        self.settings = {bucket.name: bucket for bucket in known}
        self.buckets: dict[str, dict[str, Blob]] = {bucket.name: {} for bucket in known}
        self.clock = clock
        self._generations = count(1_700_000_000_000_001)
        self._lock = threading.RLock()

    def add(self, bucket: str, settings: Bucket | None = None) -> None:
        self.settings[bucket], self.buckets[bucket] = settings or Bucket(bucket), {}

    def remove(self, bucket: str) -> None:
        del self.settings[bucket], self.buckets[bucket]

    def deny(self, bucket: str, *permissions: str) -> None:
        """Set the permissions that the caller lacks in a bucket."""
        self.settings[bucket] = replace(self.settings[bucket], denied=frozenset(permissions))

    def allow(self, bucket: str, permission: str) -> Bucket:
        """Return a bucket's settings. Raises ApiError 404 (no such bucket) or 403 (permission denied)."""
        if bucket not in self.settings:
            raise ApiError(404, "The specified bucket does not exist.", reason="notFound")
        if permission in self.settings[bucket].denied:
            kind = "bucket" if permission in ("storage.objects.list", "storage.buckets.get") else "object"
            why = f"Permission '{permission}' denied on resource (or it may not exist)."
            message = f"{CALLER} does not have {permission} access to the Google Cloud Storage {kind}. {why}"
            raise ApiError(403, message, reason="forbidden")
        return self.settings[bucket]

    def listed(self, bucket: str) -> list[Blob]:
        """Return all objects of a bucket, in the order of their names' bytes. Raises ApiError 403 or 404."""
        self.allow(bucket, "storage.objects.list")
        with self._lock:
            blobs = list(self.buckets[bucket].values())
        return sorted(blobs, key=lambda blob: blob.name)  # Python's order of strings equals that of their UTF-8 bytes

    def find(self, bucket: str, name: str, query: Mapping[str, str]) -> Blob:
        """Return the object, if the request's preconditions hold. Raises ApiError 403, 404 or 412."""
        self.allow(bucket, "storage.objects.get")
        return self._current(bucket, name, query)

    def write(self, bucket: str, blob: Blob, query: Mapping[str, str]) -> Blob:
        """Store an object as a new generation.

        Raises ApiError 403, 404 (bucket) or 412 (preconditions); nothing is changed.
        """
        self.allow(bucket, "storage.objects.create")
        with self._lock:
            before = self.buckets[bucket].get(blob.name)
            check_preconditions(before, query)
            if before:  # overwriting also needs delete: https://cloud.google.com/storage/docs/access-control/iam-json
                self.allow(bucket, "storage.objects.delete")
            stored = replace(blob, generation=next(self._generations), updated=self.clock())
            self.buckets[bucket][blob.name] = stored
        return stored

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Store an object as Google's own services do, without permission checks. Raises KeyError: no such bucket."""
        drafted = draft(name, data, {})
        with self._lock:
            stored = replace(drafted, generation=next(self._generations), updated=self.clock())
            self.buckets[bucket][name] = stored

    def delete(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        """Delete an object. Raises ApiError 403, 404 or 412."""
        self.allow(bucket, "storage.objects.delete")
        with self._lock:
            self._current(bucket, name, query)
            del self.buckets[bucket][name]

    def _current(self, bucket: str, name: str, query: Mapping[str, str]) -> Blob:
        blob = self.buckets[bucket].get(name)
        wanted = query.get("generation")
        if blob is None or (wanted and int(wanted) != blob.generation):
            raise ApiError(404, f"No such object: {bucket}/{name}", reason="notFound")
        check_preconditions(blob, query)
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
