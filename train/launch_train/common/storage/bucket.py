"""A folder of a Cloud Storage bucket as a Storage, by Google's client: its requests, our patience."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Self

from launch_train.common.errors import OutputError
from launch_train.common.storage import client as access
from launch_train.common.storage import errors
from launch_train.common.storage.errors import TornError
from launch_train.common.storage.names import Buffer, checked
from launch_train.common.storage.retry import CURRENT, LIMIT_SECONDS, GaveUpError, Tries, UnreachableError, World
from launch_train.common.storage.sources import Content, Memory, OnDisk, Received
from launch_train.common.storage.upload import LostError, Upload

ASK_SECONDS = 20.0
"""For what is only good to know."""


class GcsFolder:
    """A folder of a bucket, wherever the environment says that Cloud Storage is (`access`). An object's version is its
    generation."""

    def __init__(self, url: str, client: Any = None, *, world: World | None = None) -> None:
        bucket, _, folder = url.removeprefix("gs://").partition("/")
        self.url = url.rstrip("/")
        self._prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        self._bucket_name = bucket
        self._bucket = (client or access.open_client()).bucket(bucket)
        self._world = world or World()
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
        with self._call(name, may_lack=True) as tries:
            return tries.run(lambda: self._download(name, tries))

    def written(self, name: str) -> float:
        blob = self._blob(name)
        with self._call(name, may_lack=True) as tries:
            blob.reload(timeout=tries.timeout(), retry=tries)
            return float(blob.updated.timestamp())

    def list(self, prefix: str = "") -> list[str]:
        with self._call() as tries:
            blobs = self._bucket.list_blobs(
                prefix=self._prefix + prefix, fields="items(name),nextPageToken", timeout=tries.timeout(), retry=tries
            )
            # A name that ends with "/" is a folder that the console shows: no object of ours.
            return sorted(blob.name[len(self._prefix) :] for blob in blobs if not blob.name.endswith("/"))

    def delete(self, name: str) -> None:
        try:
            with self._call(name, may_lack=True) as tries:
                self._blob(name).delete(timeout=tries.timeout(), retry=tries)
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
        with self.within(ASK_SECONDS)._call() as tries:
            bucket.reload(timeout=tries.timeout(), retry=tries)
        return bucket

    def _upload(self, name: str, content: Content, generation: int | None) -> str:
        """Store `content` if the object's generation is the one given (0: there is none; None: whatever it is)."""
        checked(name)
        with self._call(name) as tries:
            return tries.run(Upload(partial(self._blob, name), content, generation, tries).attempt)

    def _download(self, name: str, tries: Tries) -> tuple[bytes, str]:
        """One try. The client's own retries go on in the middle of an object, and then check no checksum."""
        blob, received = self._blob(name), Received()
        blob.download_to_file(
            received, checksum="crc32c", retry=None, single_shot_download=True, timeout=tries.timeout()
        )
        if blob.generation is None:
            raise TornError("the answer doesn't say which generation it is")
        return received.data, str(blob.generation)

    def _blob(self, name: str) -> Any:
        return self._bucket.blob(self._prefix + checked(name))

    @contextmanager
    def _call(self, name: str = "", *, may_lack: bool = False) -> Iterator[Tries]:
        """One call's time, and its errors as the ones that Storage promises. `may_lack`: the object need not be."""
        tries, url = Tries(self._seconds, self._world), f"{self.url}/{name}".rstrip("/")
        token = CURRENT.set(tries)
        try:
            yield tries
        except Exception as error:
            ours = _as_ours(error, url, self._bucket_name, may_lack)
            if ours is None:
                raise
            raise ours from error
        finally:
            CURRENT.reset(token)


def _as_ours(error: Exception, url: str, bucket: str, may_lack: bool) -> Exception | None:
    """The error that Storage promises; None for one that isn't Cloud Storage's."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    if isinstance(error, GaveUpError):
        return UnreachableError(f"{url} can't be reached, {error}: {errors.said(error.__cause__ or error)}")
    if isinstance(error, LostError):
        return OutputError(f"{url} can't be sent, {error}: {errors.said(error.__cause__ or error)}")
    if isinstance(error, PreconditionFailed):
        return FileExistsError(f"{url} exists, or has another version now")
    if isinstance(error, NotFound) and may_lack and not errors.is_missing_bucket(error):
        return FileNotFoundError(f"{url} does not exist")
    return errors.refusal(error, url, bucket)
