"""Store a build's source in the project's bucket, once for each content, and read the build's log from it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import mmap
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Final, NamedTuple

from launch_train.common.storage import OutputError, open_storage
from launch_train.common.storage.bucket import Objects, checksum
from launcher.errors import LaunchError
from launcher.text import size_text

SOURCES = "source"
LOGS = "logs/cloud-build"
CHUNK = 1 << 20
LEVEL = 6
"""gzip's default level. On source code, level 9 takes a third longer and saves one percent."""
TRIES = 5
WITH_DOCKER: Final = "To build with a Docker engine on this machine instead: --builder docker"
LAST_LINES = 25
READ_SECONDS = 20.0
"""Timeout of one read of the log, which is optional."""


class Sent(NamedTuple):
    """The object with the source, and its generation. Every later object under the same name has another generation."""

    name: str
    generation: str


def send(context: IO[bytes], bucket: str, on_line: Callable[[str], None]) -> Sent:
    """Store a tar, compressed, in the bucket (gs://NAME), under the digest of its content.

    An existing object with the same bytes is reused. An object with other bytes is replaced, because others may be able
    to write to the bucket.

    Raises LaunchError: the bucket, or the folder for temporary files, can't be used.
    """
    name = f"{SOURCES}/{digest_of(context)}.tgz"
    try:
        with packed(context) as data:
            return Sent(name, stored(Objects(bucket), name, data, on_line))
    except OutputError as error:
        raise LaunchError(f"the source can't be sent to Cloud Build: {error}", WITH_DOCKER) from error
    except OSError as error:
        where = tempfile.gettempdir()
        raise LaunchError(
            f"the source can't be packed in {where}: {error.strerror}", "Set TMPDIR to a folder with enough space."
        ) from error


def digest_of(file: IO[bytes]) -> str:
    """Return the SHA-256 in hex. Reads the file from its start and rewinds it."""
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


@contextmanager
def packed(context: IO[bytes]) -> Iterator[memoryview]:
    """Yield the compressed tar as a mapped file. It may contain a PyTorch wheel, which is too large for memory."""
    with tempfile.TemporaryFile() as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=file, mtime=0) as zipped:
            shutil.copyfileobj(context, zipped, CHUNK)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


def stored(folder: Objects, name: str, data: memoryview, on_line: Callable[[str], None]) -> str:
    """Return the generation of the object with `data`. Upload it unless it exists."""
    sums = (len(data), checksum(data), md5(data))
    for _ in range(TRIES):
        there = next((entry for entry in folder.objects(name) if entry.name == name), None)
        if there and (there.size, there.crc32c, there.md5) == sums:
            on_line(f"{folder.url}/{name} exists already")
            return there.version
        on_line(f"sending {size_text(len(data))} to {folder.url}/{name}")
        with suppress(FileExistsError):  # another launch stored it first
            return folder.swap(name, data, there.version if there else "")
    raise OutputError(f"{folder.url}/{name} was changed by another writer {TRIES} times in a row")


def md5(data: memoryview) -> str:
    """Return the MD5 in Google's format. Unlike a CRC32C, it can't easily be forged for given bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


class Log:
    """A build's log, which Cloud Build appends to one object.

    Each poll reads the whole object: the log of our builds has some hundred kilobytes. A read error is reported once,
    and the build is still followed.
    """

    def __init__(self, bucket: str, build: str, on_line: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._bucket = bucket
        self._name = f"{LOGS}/log-{build}.txt"
        self._on_line = on_line
        self._passed = 0
        self._silent = False

    def follow(self, *, ended: bool = False) -> None:
        """Report the new lines. An incomplete last line waits for the next poll, unless the build has `ended`."""
        data = self._read()
        end = len(data) if ended else data.rfind(b"\n") + 1
        for line in data[self._passed : end].decode(errors="replace").splitlines():
            self.last.append(line)
            self._on_line(line)
        self._passed = max(self._passed, end)

    def _read(self) -> bytes:
        if self._silent:
            return b""
        try:
            return open_storage(self._bucket).within(READ_SECONDS).read(self._name)
        except FileNotFoundError:  # the build has written no log yet
            return b""
        except OutputError as error:
            self._silent = True
            self._on_line(f"the build's log can't be read: {error}")
            return b""
