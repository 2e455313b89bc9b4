"""A folder of a Cloud Storage bucket as a Storage: Google's client with our own retries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch_train.common.errors import OutputError
from launch_train.common.storage import client as access
from launch_train.common.storage import errors
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.names import Buffer, check_name
from launch_train.common.storage.retry import (
    CURRENT,
    LIMIT_SECONDS,
    BudgetSpentError,
    RetryBudget,
    RetryClock,
    UnreachableError,
)
from launch_train.common.storage.sources import Content, Memory, OnDisk, Received
from launch_train.common.storage.upload import LostError, Upload

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

ASK_SECONDS = 20.0
"""Time limit of optional requests."""


class GcsFolder:
    """A folder of a bucket, at the endpoint that the environment selects (`client`). An object's version is its
    generation."""

    def __init__(self, url: str, client: Any = None, *, world: RetryClock | None = None) -> None:
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._bucket_name = bucket
        self._bucket = (client or access.open_client()).bucket(bucket)
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

    def _upload(self, name: str, content: Content, generation: int | None) -> str:
        """Store `content` if the object has this generation (0: it doesn't exist; None: any)."""
        check_name(name)
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
        return self._bucket.blob(self._prefix + check_name(name))

    @contextmanager
    def _call(self, name: str = "", *, may_be_missing: bool = False) -> Iterator[RetryBudget]:
        """Limit the time of one call, and translate its errors into those that Storage promises."""
        budget, url = RetryBudget(self._seconds, self._world), f"{self.url}/{name}".rstrip("/")
        token = CURRENT.set(budget)
        try:
            yield budget
        except Exception as error:
            translated = _translate(error, url, self._bucket_name, may_be_missing)
            if translated is None:
                raise
            raise translated from error
        finally:
            CURRENT.reset(token)


def _translate(error: Exception, url: str, bucket: str, may_be_missing: bool) -> Exception | None:
    """Return the error that Storage promises; None for one that isn't Cloud Storage's."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    if isinstance(error, BudgetSpentError):
        return UnreachableError(f"{url} is unreachable, {error}: {errors.error_text(error.__cause__ or error)}")
    if isinstance(error, LostError):
        return OutputError(f"{url} could not be uploaded, {error}: {errors.error_text(error.__cause__ or error)}")
    if isinstance(error, PreconditionFailed):
        return FileExistsError(f"{url} exists, or has another version now")
    if isinstance(error, NotFound) and may_be_missing and not errors.is_missing_bucket(error):
        return FileNotFoundError(f"{url} does not exist")
    return errors.explain_error(error, url, bucket)
