"""A folder of a Cloud Storage bucket as a Storage: Google's client with our own retries.

An upload is repeated until the stored object is certainly the right one. Content is read with as few copies as
possible.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from io import SEEK_SET
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from launch_train.common.errors import OutputError
from launch_train.common.storage.names import Buffer, as_bytes, check_object_name
from launch_train.common.storage.retry import (
    CURRENT,
    LIMIT_SECONDS,
    LostError,
    RetryBudget,
    RetryClock,
    TornError,
    http_status,
    is_upload_lost,
    storage_error,
    storage_error_text,
)

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

ASK_SECONDS = 20.0
"""Time limit of optional requests."""

CHUNK = 32 << 20
"""Bytes of one request of a resumable upload, and so in memory at once."""

SESSIONS = 3
"""Starts of a resumable upload that gets lost."""

PART = 32 << 20
"""Bytes of one request: what a failed attempt loses, and what a thread keeps in memory."""

BLOCK = 1 << 20

CACHED = 1 << 17
"""Block size of checksums: google-crc32c needs a copy as bytes, which then stays in the CPU's cache."""

ONE_REQUEST = 8 << 20
"""Up to this size Google's client sends an object in one request, together with its metadata."""


class GcsFolder:
    """A folder of a bucket, at the endpoint that the environment selects (`client`). An object's version is its
    generation."""

    def __init__(self, url: str, client: Any = None, *, world: RetryClock | None = None) -> None:
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._bucket_name = bucket
        if client is None:
            from launch_train.common.storage.client import open_storage_client  # it imports requests

            client = open_storage_client()
        self._bucket = client.bucket(bucket)
        self._world = world or RetryClock()
        self._seconds = LIMIT_SECONDS

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        return self._upload(name, Memory(data, crc32c), 0 if create else None)

    def swap(self, name: str, data: Buffer, version: str) -> str:
        return self._upload(name, Memory(data), int(version or 0))

    def write_file(self, name: str, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._upload(name, OnDisk(file, os.fstat(file.fileno()).st_size), None)
        except OSError as error:
            raise OutputError(f"{path} can't be read: {error.strerror or error}") from error

    def read(self, name: str) -> bytes:
        return self.read_version(name)[0]

    def read_version(self, name: str) -> tuple[bytes, str]:
        with self._call(name, may_be_missing=True) as budget:
            return budget.run(lambda: self._download(name, budget))

    def written(self, name: str) -> float:
        blob = self._blob(name)
        with self._call(name, may_be_missing=True) as budget:
            blob.reload(timeout=budget.timeout(), retry=budget)
            return float(blob.updated.timestamp())

    def list(self, prefix: str = "") -> list[str]:
        with self._call() as budget:
            blobs = self._bucket.list_blobs(
                prefix=self._prefix + prefix, fields="items(name),nextPageToken", timeout=budget.timeout(), retry=budget
            )
            # A name that ends with "/" is a folder of the console, not one of our objects.
            return sorted(blob.name[len(self._prefix) :] for blob in blobs if not blob.name.endswith("/"))

    def delete(self, name: str) -> None:
        try:
            with self._call(name, may_be_missing=True) as budget:
                self._blob(name).delete(timeout=budget.timeout(), retry=budget)
        except FileNotFoundError:
            return

    def within(self, seconds: float) -> Self:
        other = copy(self)
        other._seconds = seconds
        return other

    def soft_delete_days(self) -> float:
        try:
            return float(self._settings().soft_delete_policy.retention_duration_seconds or 0) / 86_400
        except (OutputError, FileNotFoundError):
            return 0.0

    def project_number(self) -> str:
        """Return the number of the project that owns the bucket. Raises OutputError."""
        return str(self._settings().project_number or "")

    def _settings(self) -> Any:
        """Return the bucket with its settings. Raises OutputError."""
        bucket = self._bucket.client.bucket(self._bucket_name)
        with self.within(ASK_SECONDS)._call() as budget:
            bucket.reload(timeout=budget.timeout(), retry=budget)
        return bucket

    def _upload(self, name: str, content: Memory | OnDisk, generation: int | None) -> str:
        """Store `content` if the object has this generation (0: it doesn't exist; None: any)."""
        check_object_name(name)
        with self._call(name) as budget:
            return budget.run(Upload(partial(self._blob, name), content, generation, budget).attempt)

    def _download(self, name: str, budget: RetryBudget) -> tuple[bytes, str]:
        """Download an object in one attempt. The client's own retries would resume in the middle of it, without a
        checksum."""
        blob, received = self._blob(name), Received()
        blob.download_to_file(
            received, checksum="crc32c", retry=None, single_shot_download=True, timeout=budget.timeout()
        )
        if blob.generation is None:
            raise TornError("the response has no generation")
        return received.data, str(blob.generation)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + check_object_name(name))

    @contextmanager
    def _call(self, name: str = "", *, may_be_missing: bool = False) -> Iterator[RetryBudget]:
        """Limit the time of one call, and translate its errors into those that Storage promises."""
        budget, url = RetryBudget(self._seconds, self._world), f"{self.url}/{name}".rstrip("/")
        token = CURRENT.set(budget)
        try:
            yield budget
        except Exception as error:
            translated = storage_error(error, url, self._bucket_name, may_be_missing=may_be_missing)
            if translated is None:
                raise
            raise translated from error
        finally:
            CURRENT.reset(token)


class Upload:
    """Uploads up to 8 MiB in one request, larger objects in a resumable upload with retries by chunk."""

    def __init__(
        self, blob: Callable[[], Any], content: Memory | OnDisk, generation: int | None, budget: RetryBudget
    ) -> None:
        """`generation` is the required one of the existing object (0: none exists; None: any)."""
        self._blob, self._content, self._generation, self._budget = blob, content, generation, budget
        self._sum = ""
        self._starts = 0

    def attempt(self) -> str:
        """Upload the content and return its generation. Raises TornError if a retry may work."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            return self._upload()
        except PreconditionFailed:
            # An earlier attempt may have taken effect: then the conflict is with ourselves.
            if self._budget.unsure:
                blob = self._blob()
                with suppress(NotFound):
                    blob.reload(timeout=self._budget.timeout(), retry=self._budget)
                    if self._is_ours(blob):
                        return str(blob.generation)
            raise
        except Exception as error:
            if http_status(error) == 400 and "calculated" in storage_error_text(error):  # the checksum doesn't match
                raise TornError(storage_error_text(error)) from error
            if is_upload_lost(error):
                self._starts += 1
                if self._starts >= SESSIONS:
                    raise LostError(f"started {SESSIONS} times") from error
                raise TornError(storage_error_text(error)) from error
            raise

    def _upload(self) -> str:
        """Upload once. The service rejects content that doesn't match the checksum, so nothing truncated is stored."""
        blob = self._blob()
        self._sum = self._content.crc32c()
        blob.crc32c, blob.chunk_size = self._sum, CHUNK
        blob.upload_from_file(
            self._content.stream(),
            size=self._content.size,
            content_type="application/octet-stream",
            if_generation_match=self._generation,
            checksum=None,
            timeout=self._budget.timeout(),
            retry=self._budget,
        )
        if not self._is_ours(blob):
            raise TornError("the response to the upload is about other content")
        return str(blob.generation)

    def _is_ours(self, blob: Any) -> bool:
        return bool(blob.generation) and (blob.crc32c, blob.size) == (self._sum, self._content.size)


class Memory:
    """A buffer, which must not change before the upload has finished."""

    def __init__(self, data: Buffer, crc32c: str = "") -> None:
        self._view, self._sum = as_bytes(data), crc32c
        self.size = len(self._view)

    def stream(self) -> _View:
        return _View(self._view)

    def crc32c(self) -> str:
        if not self._sum:
            self._sum = checksum(self._view)
        return self._sum


class _View:
    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes | memoryview:
        """Read up to `size` bytes. Content of a multipart request must be bytes; larger content needs no copy."""
        end = len(self._view) if size < 0 else min(self._at + size, len(self._view))
        piece, self._at = self._view[self._at : end], end
        return bytes(piece) if len(self._view) <= ONE_REQUEST else piece


class OnDisk:
    """The first `size` bytes of an open file, which may grow during the upload."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size = file, size

    def stream(self) -> IO[bytes]:
        self._file.seek(0, SEEK_SET)
        return self._file

    def crc32c(self) -> str:
        """Return the CRC32C, computed each time: a file that has changed must not fail forever."""
        self._file.seek(0, SEEK_SET)
        return _crc32c(self._blocks())

    def _blocks(self) -> Iterator[bytes]:
        left = self.size
        while block := self._file.read(min(BLOCK, left)):
            left -= len(block)
            yield block


def checksum(data: Buffer) -> str:
    """Return the CRC32C of a buffer as in Cloud Storage, computed in blocks that stay in the CPU's cache."""
    view = as_bytes(data)
    return _crc32c(bytes(view[at : at + CACHED]) for at in range(0, len(view), CACHED))


def _crc32c(blocks: Iterator[bytes]) -> str:
    import google_crc32c

    value = 0
    for block in blocks:
        value = google_crc32c.extend(value, block)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class Received:
    """Receives a download, which comes in one piece, without a copy."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(piece)
        return len(piece)

    @property
    def data(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


# --- Objects that others have stored: training data -------------------------------------------------------------------


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
        objects: list[Object] = []
        token: str | None = ""
        while token is not None:
            with self._call() as budget:  # each page with its own time limit: a million objects have a thousand
                blobs = self._bucket.list_blobs(
                    prefix=self._prefix + prefix,
                    fields="items(name,size,generation,crc32c,md5Hash),nextPageToken",
                    page_token=token or None,
                    timeout=budget.timeout(),
                    retry=budget,
                )
                for blob in next(blobs.pages, ()):
                    if not (name := blob.name[len(self._prefix) :]).endswith("/"):
                        sums = blob.crc32c or "", blob.md5_hash or ""
                        objects.append(Object(name, blob.size, str(blob.generation), *sums))
                token = blobs.next_page_token
        return sorted(objects)

    def fetch(self, wanted: Object, file: IO[bytes]) -> None:
        """Write an object's content to an empty file, part by part, each with retries, and verify its checksum.

        Raises FileNotFoundError if this version no longer exists, and OutputError.
        """
        import google_crc32c

        for _ in range(3):
            value = 0
            for start in range(0, wanted.size, PART):
                data = self._part(wanted, start, min(start + PART, wanted.size))
                value = google_crc32c.extend(value, data)
                file.write(data)
            file.flush()
            if wanted.crc32c in ("", base64.b64encode(value.to_bytes(4, "big")).decode()):
                return
            file.seek(0)
            file.truncate()
        raise OutputError(f"{self.url}/{wanted.name} was damaged in transit: its checksum is not {wanted.crc32c}")

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
