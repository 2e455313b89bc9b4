"""What a build in the cloud leaves in the project's bucket: its source, sent once for each content, and its log."""

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
from launch_train.common.storage.objects import Objects
from launch_train.common.storage.sources import checksum
from launcher.errors import LaunchError
from launcher.text import size_text

SOURCES = "source"
LOGS = "logs/cloud-build"
CHUNK = 1 << 20
LEVEL = 6
"""gzip's own default: on source code, 9 takes a third longer for one percent less."""
TRIES = 5
WITH_DOCKER: Final = "To build with a Docker engine on this machine instead: --builder docker"
LAST_LINES = 25
READ_SECONDS = 20.0
"""For one look at the log, which is only good to have."""


class Sent(NamedTuple):
    """The object with the source, and its generation: anything stored under the name later has another one."""

    name: str
    generation: str


def send(context: IO[bytes], bucket: str, on_line: Callable[[str], None]) -> Sent:
    """Store a tar, compressed, in the bucket (gs://NAME), under the digest of its content.

    An existing object with the same bytes is reused; anything else under the name is replaced, as others can write to
    the bucket. Raises LaunchError: the bucket, or the folder for temporary files, can't be used.
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
            f"the source can't be packed in {where}: {error.strerror}", "TMPDIR names a folder with room for it."
        ) from error


def digest_of(file: IO[bytes]) -> str:
    """SHA-256 in hex; the file is at its start afterwards, as before."""
    found = hashlib.sha256()
    while chunk := file.read(CHUNK):
        found.update(chunk)
    file.seek(0)
    return found.hexdigest()


@contextmanager
def packed(context: IO[bytes]) -> Iterator[memoryview]:
    """Yield the compressed tar as a mapped file: it may contain a PyTorch wheel, too large to read into memory."""
    with tempfile.TemporaryFile() as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=file, mtime=0) as zipped:
            shutil.copyfileobj(context, zipped, CHUNK)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            yield data


def stored(folder: Objects, name: str, data: memoryview, on_line: Callable[[str], None]) -> str:
    """Return the generation of the object with `data`, which is sent unless it exists."""
    sums = (len(data), checksum(data), md5(data))
    for _ in range(TRIES):
        there = next((one for one in folder.objects(name) if one.name == name), None)
        if there and (there.size, there.crc32c, there.md5) == sums:
            on_line(f"{folder.url}/{name} exists already")
            return there.version
        on_line(f"sending {size_text(len(data))} to {folder.url}/{name}")
        with suppress(FileExistsError):  # another launch was quicker
            return folder.swap(name, data, there.version if there else "")
    raise OutputError(f"{folder.url}/{name} was changed by another writer {TRIES} times in a row")


def md5(data: memoryview) -> str:
    """Return the MD5 as Google writes it. Unlike a CRC32C, it can't be forged for given bytes."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


class Log:
    """A build's log, which Cloud Build writes on and on into one object.

    It is read whole each time: a build of ours says some hundred kilobytes. What can't be read is said once, and the
    build is followed all the same.
    """

    def __init__(self, bucket: str, build: str, on_line: Callable[[str], None]) -> None:
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._bucket = bucket
        self._name = f"{LOGS}/log-{build}.txt"
        self._on_line = on_line
        self._passed = 0
        self._silent = False

    def follow(self, *, ended: bool = False) -> None:
        """Pass on the lines that are new; a last one without its end waits for that, unless the build has `ended`."""
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
        except FileNotFoundError:  # the build hasn't said anything yet
            return b""
        except OutputError as error:
            self._silent = True
            self._on_line(f"the build's log can't be read: {error}")
            return b""
