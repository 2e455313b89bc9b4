"""Download data from a bucket once per node. Cached by object generation: changed objects are downloaded again."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from launch_train.common.errors import OutputError, UnfitError, UsageError
from launch_train.common.storage import UnreachableError
from launch_train.common.storage.bucket import Object, Objects
from launch_train.common.text import si
from launch_train.data.token_file import ProgressTimer, unfit, written

THREADS = 16
"""Concurrent downloads."""

AHEAD = 4
"""Objects that `stream` downloads in advance."""

OWN = ".launch/"
"""Names in a bucket that launch itself writes (launch_train.data.token_store): no data."""

CHANGED = "was changed or deleted while it was read: start again to read the new content"

ROOM = 0.98
"""Share of the free disk space that downloads may use."""


def fetch(url: str, cache: Path, say: Callable[[str], None] = print) -> Path:
    """Download gs://BUCKET/NAME (a file), everything in gs://BUCKET/FOLDER (a folder), or what matches a pattern (*
    within a name, ** across folders, ?, [a-z]; a folder), and return the local path.

    If it is cached, only a list request is made. Raises UsageError if it does not exist, or may not be read;
    UnfitError if the disk is too small, or the bucket can't be reached.
    """
    bucket, path = _split(url)
    with _data_errors():
        folder = Objects(f"gs://{bucket}")
        base, objects = _listed(folder, path, url)
        return _Cache(bucket, folder, cache, say).tree(base, objects)


def list_objects(url: str) -> list[Object]:
    """Return the objects that `fetch` would download. Raises as it does."""
    bucket, path = _split(url)
    with _data_errors():
        return _listed(Objects(f"gs://{bucket}"), path, url)[1]


def stream(url: str, wanted: Sequence[Object], cache: Path) -> Iterator[Path]:
    """Download objects one by one, the next AHEAD of them in the background, and delete each after its use.

    The disk never holds more than AHEAD + 1 of them. Raises as `fetch` does.
    """
    bucket, _ = _split(url)
    cache.mkdir(parents=True, exist_ok=True)
    folder = Objects(f"gs://{bucket}")
    pool = ThreadPoolExecutor(AHEAD, "download")
    with _data_errors(), tempfile.TemporaryDirectory(prefix=".stream-", dir=cache) as scratch:
        targets = [Path(scratch, str(number), Path(item.name).name) for number, item in enumerate(wanted)]
        pending = deque[Future[None]]()
        try:
            for number, target in enumerate(targets):
                while len(pending) <= AHEAD and number + len(pending) < len(targets):
                    at = number + len(pending)
                    pending.append(pool.submit(_download_to, folder, wanted[at], targets[at]))
                pending.popleft().result()
                yield target
                target.unlink()
        finally:
            folder.stopped = True
            pool.shutdown(cancel_futures=True)


def _download_to(folder: Objects, wanted: Object, target: Path) -> None:
    target.parent.mkdir()
    try:
        with target.open("wb") as file:
            folder.fetch(wanted, file)
    except FileNotFoundError as error:
        raise UnfitError(f"data: {folder.url}/{wanted.name} {CHANGED}") from error
    except OSError as error:
        raise unfit(error, target) from error


def _split(url: str) -> tuple[str, str]:
    bucket, _, path = url.removeprefix("gs://").partition("/")
    return bucket, path.strip("/")


def _listed(folder: Objects, path: str, url: str) -> tuple[str, list[Object]]:
    """Return the folder that the objects' local names are relative to (or the object's own name), and the objects."""
    wildcard = _WILDCARD.search(path)
    parts = re.findall(r"\*\*/|\*\*|\*|\?|\[[^]/]+\]|.", path, re.DOTALL)
    expression = "".join(_AS_EXPRESSION.get(part, part if part[0] == "[" else re.escape(part)) for part in parts)
    is_wanted = re.compile(f"{expression}(/.*)?" if path else ".*", re.DOTALL).fullmatch
    fixed = path[: wildcard.start()] if wildcard else path
    objects = [item for item in folder.objects(fixed) if is_wanted(item.name) and not item.name.startswith(OWN)]
    if not objects:
        raise UsageError(f"data: {url} does not exist")
    return path if fixed == path else fixed.rpartition("/")[0], objects


@contextmanager
def _data_errors() -> Iterator[None]:
    """Raise the storage's errors as errors of the data."""
    try:
        yield
    except UnreachableError as error:
        raise UnfitError(f"data: {error}") from error
    except OutputError as error:
        raise UsageError(f"data: {error}") from error


_WILDCARD = re.compile(r"[*?]|\[[^]/]+\]")
_AS_EXPRESSION = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


class _Cache:
    """A cache of objects, by name and generation, and of folders with hard links to them.

    Unchanged objects are not downloaded again.
    """

    def __init__(self, bucket: str, folder: Objects, cache: Path, say: Callable[[str], None]) -> None:
        self._bucket, self._folder, self._say = bucket, folder, say
        self._objects, self._trees = cache / "objects", cache / "trees"

    def tree(self, path: str, objects: list[Object]) -> Path:
        """Return the local file, if `path` is an object's name, or folder; download missing objects."""
        names = [item.name.removeprefix(path).lstrip("/") or Path(item.name).name for item in objects]
        single = len(objects) == 1 and objects[0].name == path
        versions = "\n".join(f"{item.name} {item.version}" for item in objects)
        tree = self._trees / hashlib.sha256(f"{self._bucket}/{path}\n{versions}".encode()).hexdigest()[:40]
        if not tree.is_dir():
            self._download([item for item in objects if not self._kept(item).exists()])
            try:
                self._link(tree, dict(zip(names, objects, strict=True)))
            except OSError as error:
                raise unfit(error, tree) from error
        return tree / names[0] if single else tree

    def _kept(self, item: Object) -> Path:
        return self._objects / hashlib.sha256(f"{self._bucket}/{item.name} {item.version}".encode()).hexdigest()[:40]

    def _download(self, missing: list[Object]) -> None:
        """Download all objects or raise. Objects downloaded before an error stay cached."""
        self._require_room(sum(item.size for item in missing))
        progress, size = ProgressTimer(), 0
        pool = ThreadPoolExecutor(THREADS, "download")
        try:
            for count, item in enumerate(pool.map(self._fetch, missing), start=1):
                size += item.size
                if seconds := progress.due():
                    rate = si(size / seconds)
                    self._say(f"data: {count} of {len(missing)} objects, {si(size)}B ({rate}B/s)")
        finally:
            self._folder.stopped = True  # after an error, large downloads would continue for minutes
            pool.shutdown(cancel_futures=True)

    def _fetch(self, item: Object) -> Object:
        with written(self._kept(item)) as file:
            try:
                self._folder.fetch(item, file)
            except FileNotFoundError as error:
                raise UnfitError(f"data: gs://{self._bucket}/{item.name} {CHANGED}") from error
        return item

    def _require_room(self, size: int) -> None:
        try:
            self._objects.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._objects).free
        except OSError as error:
            raise unfit(error, self._objects) from error
        if size > ROOM * free:
            raise UnfitError(
                f"data: the disk is too small for {si(size)}B: {si(free)}B are free at {self._objects.parent}"
            )

    def _link(self, tree: Path, objects: dict[str, Object]) -> None:
        """Create the folder with the bucket's layout from hard links, atomically."""
        self._trees.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self._trees))
        try:
            for name, item in objects.items():
                target = making / name
                if not target.resolve().is_relative_to(making.resolve()):
                    raise UsageError(f"data: gs://{self._bucket}/{item.name} is not a valid file name")
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(self._kept(item), target)
            making.chmod(0o755)
            try:
                making.rename(tree)
            except OSError:
                if not tree.is_dir():  # another process may have created it first
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
