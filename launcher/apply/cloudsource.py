"""What a build in the cloud leaves in the project's bucket: its source, sent once for each content, and its log."""

from __future__ import annotations

import gzip
import hashlib
import mmap
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from typing import IO

from launcher.errors import LaunchError
from train.storage import OutputError, Storage, open_storage

SOURCES = "source"
LOGS = "logs/cloud-build"
CHUNK = 1 << 20
LEVEL = 6
"""gzip's own default: on source code, 9 takes a third longer for one percent less."""
LAST_LINES = 25
READ_SECONDS = 20.0
"""For one look at the log, which is only good to have."""


def send(context: IO[bytes], bucket: str, on_line: Callable[[str], None]) -> str:
    """Store a tar, compressed, in the bucket (gs://NAME) and return the object's name, which is the content's digest.

    What is there already is not sent again. Raises LaunchError: the bucket, or the folder for temporary
    files, can't be used.
    """
    name = f"{SOURCES}/{digest_of(context)}.tgz"
    try:
        storage = open_storage(bucket)
        if name in storage.list(name):
            on_line(f"{bucket}/{name} is there already")
        else:
            upload(context, storage, name, on_line)
    except OutputError as error:
        raise LaunchError(
            f"the source can't be sent to Cloud Build: {error}",
            "With a Docker engine on this machine it need not be: --builder docker",
        ) from error
    except OSError as error:
        where = tempfile.gettempdir()
        raise LaunchError(
            f"the source can't be packed in {where}: {error.strerror}", "TMPDIR names a folder with room for it."
        ) from error
    return name


def digest_of(file: IO[bytes]) -> str:
    """SHA-256 in hex; the file is at its start afterwards, as before."""
    found = hashlib.sha256()
    while chunk := file.read(CHUNK):
        found.update(chunk)
    file.seek(0)
    return found.hexdigest()


def upload(context: IO[bytes], storage: Storage, name: str, on_line: Callable[[str], None]) -> None:
    """Compress into a file, which is mapped rather than read: a PyTorch wheel may be in it."""
    with tempfile.TemporaryFile() as packed:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=LEVEL, fileobj=packed, mtime=0) as zipped:
            shutil.copyfileobj(context, zipped, CHUNK)
        packed.flush()
        on_line(f"sending {packed.tell() / 1e6:.1f} MB to {storage.url}/{name}")
        with mmap.mmap(packed.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            try:
                storage.write(name, data, create=True)
            except FileExistsError:  # another launch sent the same at the same time
                return


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
