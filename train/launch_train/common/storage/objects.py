"""Read objects of a bucket that others have stored: training data."""

from __future__ import annotations

import base64
from typing import IO, NamedTuple

from launch_train.common.errors import OutputError
from launch_train.common.storage.bucket import GcsFolder
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.retry import RetryBudget

PART = 32 << 20
"""Bytes of one request: what a failed attempt loses, and what a thread keeps in memory."""


class Object(NamedTuple):
    """An object. `version` is its generation; `crc32c` and `md5` are base64, empty if it has none."""

    name: str
    size: int
    version: str
    crc32c: str
    md5: str = ""


class Objects(GcsFolder):
    """The objects of a bucket or of a folder in it."""

    stopped = False
    """Set by another thread: no further part is requested."""

    def objects(self, prefix: str = "") -> list[Object]:
        """Return the objects whose names start with `prefix`, sorted by name. Raises OutputError."""
        found, token = self._page(prefix, None)
        while token:
            more, token = self._page(prefix, token)
            found += more
        return sorted(item for item in found if not item.name.endswith("/"))

    def _page(self, prefix: str, token: str | None) -> tuple[list[Object], str | None]:
        """List one page in one call, with its own time limit: a million objects have a thousand pages."""
        with self._call() as budget:
            blobs = self._bucket.list_blobs(
                prefix=self._prefix + prefix,
                fields="items(name,size,generation,crc32c,md5Hash),nextPageToken",
                page_token=token,
                timeout=budget.timeout(),
                retry=budget,
            )
            page = next(blobs.pages, ())
            objects = [
                Object(
                    blob.name[len(self._prefix) :],
                    blob.size,
                    str(blob.generation),
                    blob.crc32c or "",
                    blob.md5_hash or "",
                )
                for blob in page
            ]
            return objects, blobs.next_page_token

    def fetch(self, wanted: Object, file: IO[bytes]) -> None:
        """Write an object's content to an empty file, part by part, each with retries, and verify its checksum.

        Raises FileNotFoundError if this version no longer exists, and OutputError.
        """
        for _ in range(3):
            if self._download_all(wanted, file):
                return
            file.seek(0)
            file.truncate()
        raise OutputError(f"{self.url}/{wanted.name} was damaged in transit: its checksum is not {wanted.crc32c}")

    def _download_all(self, wanted: Object, file: IO[bytes]) -> bool:
        import google_crc32c

        value = 0
        for start in range(0, wanted.size, PART):
            data = self._part(wanted, start, min(start + PART, wanted.size))
            value = google_crc32c.extend(value, data)
            file.write(data)
        file.flush()
        return wanted.crc32c in ("", base64.b64encode(value.to_bytes(4, "big")).decode())

    def _part(self, wanted: Object, start: int, end: int) -> bytes:
        if self.stopped:
            raise OutputError(f"{self.url}/{wanted.name}: download cancelled")
        blob = self._bucket.blob(self._prefix + wanted.name, generation=int(wanted.version))

        def attempt(budget: RetryBudget) -> bytes:
            data: bytes = blob.download_as_bytes(
                start=start, end=end - 1, raw_download=True, checksum=None, retry=None, timeout=budget.timeout()
            )
            if len(data) != end - start:
                raise TornError(f"received {len(data)} of {end - start} bytes")
            return data

        with self._call(wanted.name, may_be_missing=True) as budget:
            return budget.run(lambda: attempt(budget))
