"""Index of the images in a dataset: built once per node, cached, and memory-mapped by all processes."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data.token_file import file_key, written

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
HELD_OUT_FOLDERS = ("val", "validation", "eval")
_LABELS = ("cls", "class", "label")
"""JSON keys in a shard that may hold the label, in order of precedence."""


class Listing:
    """Images and their labels. A row is (name, shard, offset, size, label); shard -1: the image is a separate file.

    Pickled without its rows: other processes map the index file.
    """

    def __init__(self, name: str, root: Path, path: Path, shards: tuple[str, ...], labels: tuple[str, ...]) -> None:
        """`labels`: class names of a folder; empty for shards, which have only class numbers."""
        self.name, self._root, self._path, self._shards, self.labels = name, root, path, shards, labels

    @cached_property
    def _rows(self) -> NDArray[Any]:
        rows: NDArray[Any] = np.load(self._path, mmap_mode="r")
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_rows"}

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def sha256(self) -> str:
        """Return the digest of the index: names, sizes and labels."""
        return self._path.stem

    @property
    def classes(self) -> int:
        return len(self.labels) or int(self._rows["label"].max()) + 1

    def where(self, index: int) -> str:
        """Return the image's path, or its shard and its name in the shard."""
        row = self._rows[index]
        name = os.fsdecode(row["name"])
        return str(self._root / name) if row["shard"] < 0 else f"{self._root / self._shards[row['shard']]}: {name}"

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the encoded bytes of an image, and its label. Raises OSError."""
        row = self._rows[index]
        if row["shard"] < 0:
            return (self._root / os.fsdecode(row["name"])).read_bytes(), int(row["label"])
        with (self._root / self._shards[row["shard"]]).open("rb", buffering=0) as file:
            content = os.pread(file.fileno(), int(row["size"]), int(row["offset"]))
        return content, int(row["label"])


class Row(NamedTuple):
    name: str
    shard: int
    offset: int
    size: int
    label: int


def listed(root: Path, cache: Path, name: str) -> tuple[Listing, Listing | None]:
    """Index the training images at `root`, and the held-out images if they are in a separate folder.

    `root` is a folder of class folders, a folder of tar shards, one shard, or a folder with train/ and val/
    (validation/, eval/) that contain any of these. Raises UsageError if there are no images, or classes don't match.
    """
    if not root.exists():
        raise UsageError(f"data: {name} does not exist on this machine")
    if not (root / "train").is_dir():
        return _listing(root, cache, name), None
    train = _listing(root / "train", cache, f"{name}/train")
    for folder in HELD_OUT_FOLDERS:
        if (root / folder).is_dir():
            held_out = _listing(root / folder, cache, f"{name}/{folder}")
            require_same_classes(train, held_out)
            return train, held_out
    return train, None


def require_same_classes(train: Listing, held_out: Listing) -> None:
    """Raise UsageError unless the folders of training and held-out images have the same classes."""
    if held_out.labels != train.labels:
        odd = sorted(set(held_out.labels) ^ set(train.labels))
        what = f"the class {odd[0]} is" if odd else "classes are"
        raise UsageError(f"data: {what} in only one of {train.name} and {held_out.name}")


def holds_images(root: Path) -> bool:
    """Return whether a file or folder seems to hold images rather than text."""
    if root.is_file():
        return root.suffix == ".tar"
    if (root / "train").is_dir():
        return holds_images(root / "train")
    inside = sorted(path for path in root.glob("*") if not path.name.startswith("."))
    folders = [path for path in inside if path.is_dir()]
    return any(path.suffix == ".tar" for path in inside) or any(
        path.suffix.lower() in SUFFIXES for folder in folders[:3] for path in folder.glob("*")
    )


def _listing(root: Path, cache: Path, name: str) -> Listing:
    shards = [root] if root.is_file() else sorted(root.glob("*.tar"))
    if shards:
        top = root.parent if root.is_file() else root
        return Listing(name, top, _index_of_shards(shards, cache, name), tuple(path.name for path in shards), ())
    labels = tuple(sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not labels:
        raise UsageError(f"data: {name} holds neither folders of images, one for each class, nor tar shards")
    rows = list[Row]()
    for number, label in enumerate(labels):
        images = list[tuple[str, int]]()
        for folder, folders, files in os.walk(root / label, followlinks=True):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            paths = [
                os.path.join(folder, file)  # noqa: PTH118 - a million Paths take seconds
                for file in files
                if file.lower().endswith(SUFFIXES) and not file.startswith(".")
            ]
            images += [(os.path.relpath(path, root), os.stat(path).st_size) for path in paths]  # noqa: PTH116
        if not images:
            raise UsageError(f"data: the folder {root / label} is a class without images ({', '.join(SUFFIXES)})")
        rows += [Row(path, -1, 0, size, number) for path, size in sorted(images)]
    return Listing(name, root, _saved(rows, cache, name), (), labels)


# --- Shards ---------------------------------------------------------------------------------------------------------


def _index_of_shards(shards: list[Path], cache: Path, name: str) -> Path:
    """Return the index file of all shards, which are read once: where it is cached is noted under their file_key."""
    known = cache / f"{file_key(shards)}.shards.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        path: Path = cache / json.loads(known.read_text())["rows"]
        if path.is_file():
            return path
    path = _saved([row for number, shard in enumerate(shards) for row in scanned(shard, number)], cache, name)
    with written(known) as file:
        file.write(json.dumps({"rows": path.name}).encode())
    return path


def scanned(shard: Path, number: int) -> list[Row]:
    """Return the images of a tar shard: KEY.jpg (png, webp) with KEY.cls or KEY.json.

    Raises UsageError if the shard is damaged or truncated, or a label is missing or invalid.
    """
    images, labels = dict[str, tarfile.TarInfo](), dict[str, int]()
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                # The key of a/b.c.jpg is a/b: it ends at the file name's first dot.
                folder, slash, file = member.name.rpartition("/")
                key, suffix = folder + slash + file.partition(".")[0], Path(file).suffix.lower()
                if member.isfile() and suffix in SUFFIXES:
                    images[key] = member
                elif member.isfile() and suffix in (".cls", ".json"):
                    labels[key] = _label(tar.extractfile(member).read(), f"{shard}: {member.name}")  # type: ignore[union-attr]  # a regular file has content
    except tarfile.TarError as error:
        raise UsageError(f"data: {shard} can't be read as an unpacked tar file: {error}") from error
    with shard.open("rb") as raw:  # ends with two blocks of zeros (POSIX.1-2001, pax), which tarfile doesn't check
        raw.seek(-min(shard.stat().st_size, 2 * tarfile.BLOCKSIZE), os.SEEK_END)
        is_complete = raw.read() == bytes(2 * tarfile.BLOCKSIZE)
    if not is_complete:
        raise UsageError(f"data: {shard} has no end-of-archive marker: it was cut short, or is still being written")
    if missing := sorted(set(images) - set(labels)):
        raise UsageError(f"data: {shard}: {images[missing[0]].name} has no label file ({missing[0]}.cls or .json)")
    return [Row(image.name, number, image.offset_data, image.size, labels[key]) for key, image in images.items()]


def _label(content: bytes, where: str) -> int:
    try:
        label = json.loads(content)
        if isinstance(label, dict):
            label = next(label[key] for key in _LABELS if key in label)
    except (ValueError, StopIteration):
        label = None
    if type(label) is not int or label < 0:
        raise UsageError(f"data: {where} is not a class number: {content[:40]!r}")
    return label


def _saved(rows: list[Row], cache: Path, name: str) -> Path:
    """Save rows in a cache file that is named by their digest, and return its path. Raises UsageError if empty."""
    if not rows:
        raise UsageError(f"data: {name} holds no images ({', '.join(SUFFIXES)})")
    names = [os.fsencode(row.name) for row in rows]
    fields = [("name", f"S{max(map(len, names))}"), ("shard", "i4"), ("offset", "i8"), ("size", "i8"), ("label", "i4")]
    table = np.array([(name, *row[1:]) for name, row in zip(names, rows, strict=True)], fields)
    path = cache / f"{hashlib.sha256(table.tobytes()).hexdigest()}.npy"
    if not path.is_file():
        with written(path) as file:
            np.save(file, table)
    return path
