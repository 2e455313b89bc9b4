"""Download data from a bucket once per node. Cached by object generation: changed objects are downloaded again."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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

ROOM = 0.98
"""Share of the free disk space that downloads may use."""


def fetch(url: str, cache: Path) -> Path:
    """Download gs://BUCKET/NAME (a file), everything in gs://BUCKET/FOLDER (a folder), or what matches a pattern (*
    within a name, ** across folders, ?, [a-z]; a folder), and return the local path.

    Each object is cached by its name and generation, so if all are, only a list request is made; a folder consists of
    hard links to them. Raises UsageError if it does not exist, or may not be read; UnfitError if the disk is too small,
    or the bucket can't be reached.
    """
    bucket, path = _split(url)

    def kept(item: Object) -> Path:
        return cache / "objects" / hashlib.sha256(f"{bucket}/{item.name} {item.version}".encode()).hexdigest()[:40]

    with _data_errors():
        folder = Objects(f"gs://{bucket}")
        base, objects = _listed(folder, path, url)
        names = [item.name.removeprefix(base).lstrip("/") or Path(item.name).name for item in objects]
        versions = "\n".join(f"{item.name} {item.version}" for item in objects)
        tree = cache / "trees" / hashlib.sha256(f"{bucket}/{base}\n{versions}".encode()).hexdigest()[:40]
        for name, item in zip(names, objects, strict=True):
            if not (tree / name).resolve().is_relative_to(tree.resolve()):
                raise UsageError(f"data: gs://{bucket}/{item.name} is not a valid file name")
        if not tree.is_dir():
            _download(folder, {kept(item): item for item in objects if not kept(item).exists()}, cache)
            try:
                _link(tree, {name: kept(item) for name, item in zip(names, objects, strict=True)})
            except OSError as error:
                raise unfit(error, tree) from error
    return tree / names[0] if len(objects) == 1 and objects[0].name == base else tree


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

    def download(item: Object, target: Path) -> None:
        target.parent.mkdir()
        try:
            with target.open("wb") as file:
                _fetch_object(folder, item, file)
        except OSError as error:
            raise unfit(error, target) from error

    with _data_errors(), tempfile.TemporaryDirectory(prefix=".stream-", dir=cache) as scratch:
        targets = [Path(scratch, str(number), Path(item.name).name) for number, item in enumerate(wanted)]
        pending = deque[Future[None]]()
        try:
            for number, target in enumerate(targets):
                while len(pending) <= AHEAD and number + len(pending) < len(targets):
                    at = number + len(pending)
                    pending.append(pool.submit(download, wanted[at], targets[at]))
                pending.popleft().result()
                yield target
                target.unlink()
        finally:
            folder.stopped = True
            pool.shutdown(cancel_futures=True)


def _fetch_object(folder: Objects, item: Object, file: IO[bytes]) -> None:
    try:
        folder.fetch(item, file)
    except FileNotFoundError as error:
        changed = "was changed or deleted while it was read: start again to read the new content"
        raise UnfitError(f"data: {folder.url}/{item.name} {changed}") from error


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


def _download(folder: Objects, missing: dict[Path, Object], cache: Path) -> None:
    """Download objects to files, all of them or raise. Objects downloaded before an error stay cached."""
    size = sum(item.size for item in missing.values())
    try:
        cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(cache).free
    except OSError as error:
        raise unfit(error, cache / "objects") from error
    if size > ROOM * free:
        raise UnfitError(f"data: the disk is too small for {si(size)}B: {si(free)}B are free at {cache}")

    def download(target: Path) -> int:
        with written(target) as file:
            _fetch_object(folder, missing[target], file)
        return missing[target].size

    progress, size = ProgressTimer(), 0
    pool = ThreadPoolExecutor(THREADS, "download")
    try:
        for count, item_size in enumerate(pool.map(download, missing), start=1):
            size += item_size
            if seconds := progress.due():
                print(f"data: {count} of {len(missing)} objects, {si(size)}B ({si(size / seconds)}B/s)")
    finally:
        folder.stopped = True  # after an error, large downloads would continue for minutes
        pool.shutdown(cancel_futures=True)


def _link(tree: Path, files: dict[str, Path]) -> None:
    """Create the folder with the bucket's layout from hard links, atomically."""
    tree.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".tmp-", dir=tree.parent))
    try:
        for name, file in files.items():
            (making / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(file, making / name)
        making.chmod(0o755)
        try:
            making.rename(tree)
        except OSError:
            if not tree.is_dir():  # another process may have created it first
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
