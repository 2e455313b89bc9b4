"""A bucket's objects as they are found there, for reading: data that others have stored."""

from __future__ import annotations

import base64
from typing import IO, NamedTuple

from launch_train.common.errors import OutputError
from launch_train.common.storage.bucket import GcsFolder
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.retry import Tries

PART = 32 << 20
"""Bytes of one request: what a try that fails has lost, and what a thread holds in memory."""


class Object(NamedTuple):
    """`version` is the generation; `crc32c` and `md5` as Google writes them, empty where it has none."""

    name: str
    size: int
    version: str
    crc32c: str
    md5: str = ""


class Objects(GcsFolder):
    """The objects of a bucket or of a folder in it."""

    stopped = False
    """Set from outside: no further part of an object is asked for."""

    def objects(self, prefix: str = "") -> list[Object]:
        """Those whose names start with `prefix`, sorted by name. Raises OutputError."""
        found, token = self._page(prefix, None)
        while token:
            more, token = self._page(prefix, token)
            found += more
        return sorted(one for one in found if not one.name.endswith("/"))

    def _page(self, prefix: str, token: str | None) -> tuple[list[Object], str | None]:
        """A call each, with a call's time: a million objects are a thousand pages."""
        with self._call() as tries:
            blobs = self._bucket.list_blobs(
                prefix=self._prefix + prefix,
                fields="items(name,size,generation,crc32c,md5Hash),nextPageToken",
                page_token=token,
                timeout=tries.timeout(),
                retry=tries,
            )
            page = next(blobs.pages, ())
            found = [
                Object(b.name[len(self._prefix) :], b.size, str(b.generation), b.crc32c or "", b.md5_hash or "")
                for b in page
            ]
            return found, blobs.next_page_token

    def fetch(self, wanted: Object, file: IO[bytes]) -> None:
        """Write an object's content to an empty file, part by part, each tried again by itself; in the end its checksum
        is compared. Raises FileNotFoundError if this version is gone, OutputError."""
        for _ in range(3):
            if self._fetched(wanted, file):
                return
            file.seek(0)
            file.truncate()
        raise OutputError(f"{self.url}/{wanted.name} arrives damaged: its checksum is not {wanted.crc32c}")

    def _fetched(self, wanted: Object, file: IO[bytes]) -> bool:
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
            raise OutputError(f"{self.url}/{wanted.name} is no longer wanted")
        blob = self._bucket.blob(self._prefix + wanted.name, generation=int(wanted.version))

        def attempt(tries: Tries) -> bytes:
            data: bytes = blob.download_as_bytes(
                start=start, end=end - 1, raw_download=True, checksum=None, retry=None, timeout=tries.timeout()
            )
            if len(data) != end - start:
                raise TornError(f"{len(data)} of {end - start} bytes came")
            return data

        with self._call(wanted.name, may_lack=True) as tries:
            return tries.run(lambda: attempt(tries))
