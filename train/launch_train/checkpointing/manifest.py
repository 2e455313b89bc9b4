"""Checkpoint format: numbered parts, and a manifest with their sizes and digests, which is written last.

Each start of the run has its own sub-folder of a step, so that two starts never mix:

    checkpoints/step-00000300/0001-0002/rank-00000-0000.part …    what rank 0 saved: a torch.save file, in pieces
    checkpoints/step-00000300/0001-0002/manifest.json             sizes and digests; it makes the checkpoint valid

`torch.load` notices a lost byte but no flipped bit, so a reader checks the digests first and trusts manifests only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from launch_train import runfolder
from launch_train.checkpointing.multipart_writer import WORKERS, CheckpointPart
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.storage import Storage
from launch_train.common.storage.bucket import checksum
from launch_train.common.text import listed

FORMAT = 1
"""Incremented when older versions of launch can't read what is written."""


class CheckpointError(TrainError):
    """A checkpoint doesn't exist, or doesn't match its manifest."""


class Manifest(NamedTuple):
    """The manifest of a checkpoint. `shards` has each rank's parts in order, `about` describes the run."""

    step: int
    start: str
    shards: tuple[tuple[CheckpointPart, ...], ...]
    about: dict[str, Any]

    @property
    def folder(self) -> str:
        return runfolder.checkpoint_folder(self.step, self.start)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for shard in self.shards for part in shard)


# --- Writing --------------------------------------------------------------------------------------------------------


def commit(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint valid, once all of its parts are stored. Raises FileExistsError if another one exists in its
    place."""
    name = runfolder.manifest(manifest.step, manifest.start)
    storage.write(name, manifest_json(manifest), create=True)


def manifest_json(manifest: Manifest) -> bytes:
    """Return the manifest as JSON. Its last line is a digest of the rest, because a manifest may be damaged too."""
    shards = [[part._asdict() for part in shard] for shard in manifest.shards]
    data = {"format": FORMAT, **manifest._asdict(), "shards": shards}
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# --- Reading --------------------------------------------------------------------------------------------------------


def manifest_names(storage: Storage, step: int | None = None) -> list[str]:
    """Return the names of the manifests in a run folder, newest step and start first; of one step, if it is given."""
    matches = filter(None, map(runfolder.MANIFEST.match, storage.list(f"{runfolder.CHECKPOINTS}/")))
    wanted = [match for match in matches if step is None or int(match["step"]) == step]
    return [match[0] for match in sorted(wanted, key=lambda match: (match["step"], match["start"]), reverse=True)]


def _is_part(part: CheckpointPart) -> bool:
    """Return whether a part is a name without a path, a size and a checksum: a manifest may be another program's."""
    is_name = isinstance(part.name, str) and re.fullmatch(r"\w[\w.-]*", part.name)
    return bool(is_name) and type(part.bytes) is int and 0 <= part.bytes < 1 << 50 and isinstance(part.crc32c, str)


def metrics(storage: Storage, metric: str) -> dict[int, float]:
    """Return the value of a metric (`eval_loss`) by step, of the newest start of each, for those that have one.

    Damaged manifests are skipped.
    """
    values: dict[int, float] = {}
    seen: set[int] = set()
    for name in manifest_names(storage):
        try:
            manifest = read(storage, name)
        except CheckpointError:
            continue
        value = manifest.about.get(metric)
        if manifest.step not in seen and isinstance(value, int | float) and math.isfinite(value):
            values[manifest.step] = float(value)
        seen.add(manifest.step)
    return values


def read(storage: Storage, name: str) -> Manifest:
    """Read a manifest. Raises CheckpointError if it is damaged or missing, UsageError if another version wrote it."""
    try:
        data = json.loads(storage.read(name))
        digest = data.pop("sha256")
        is_intact = digest == _digest(data)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} does not exist") from error
    if not is_intact:
        raise CheckpointError(f"{name} is damaged: its digest does not match its content")
    if data.get("format", FORMAT) != FORMAT:
        raise UsageError(
            f"{name} was written by another version of launch (format {data['format']}, this one reads {FORMAT}): "
            "resume with that version, or start a fresh run (--new)"
        )
    try:
        shards = tuple(tuple(CheckpointPart(**part) for part in shard) for shard in data["shards"])
        manifest = Manifest(data["step"], data["start"], shards, data["about"])
        wanted = runfolder.manifest(manifest.step, manifest.start)
        parts = [part for shard in shards for part in shard]
        if not (isinstance(manifest.about, dict) and all(shards) and all(map(_is_part, parts))):
            raise ValueError("it has no parts or no description, or a part that is not a file of its folder")
        if len({part.name for part in parts}) < len(parts):
            raise ValueError("it has a part twice")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{name} is not a launch manifest: {type(error).__name__}: {error}") from error
    if name != wanted:
        raise CheckpointError(f"{name} belongs to another checkpoint ({manifest.folder})")
    return manifest


def fetch(storage: Storage, manifest: Manifest, folder: Path) -> list[Path]:
    """Download a checkpoint's shards to local files, parts in parallel, each checked against its digest.

    Raises CheckpointError if a part is missing or damaged, and OutputError if the storage can't be read.
    """
    paths = [folder / f"rank-{rank:05d}.pt" for rank in range(len(manifest.shards))]
    jobs = []
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint") as pool:
        for path, shard in zip(paths, manifest.shards, strict=True):
            path.touch()
            offset = 0
            for part in shard:
                jobs.append(pool.submit(_fetch_part, storage, manifest.folder, part, path, offset))
                offset += part.bytes
        for job in jobs:
            job.result()
    return paths


def _fetch_part(storage: Storage, folder: str, part: CheckpointPart, path: Path, offset: int) -> None:
    try:
        data = storage.read(f"{folder}/{part.name}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}/{part.name} is missing") from error
    if len(data) != part.bytes or checksum(data) != part.crc32c:
        raise CheckpointError(f"{folder}/{part.name} is damaged: size or CRC32C does not match the manifest")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read_all(folder: str, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return what all ranks saved in the checkpoint `folder`. Raises CheckpointError if it is incomplete."""
    from launch_train.checkpointing.partition import references
    from launch_train.distributed.dtensor import is_incomplete, saved_tensors

    try:
        saved = [load_shard(path) for path in paths]
        tensors, wanted = saved_tensors(saved), references(saved[0]["rest"])
        for shard in saved:
            dict(shard["own"])
    except _MACHINE_ERRORS:
        raise
    except Exception as error:  # torch raises many kinds for another program's file
        if "Cannot allocate memory" in str(error):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{folder} is not a launch checkpoint: {type(error).__name__}: {reason}") from error
    if missing := sorted(path for path in wanted if path not in tensors or is_incomplete(tensors[path])):
        raise CheckpointError(f"{folder} is incomplete: missing, or partly missing: {listed(missing, 3)}")
    return saved


_MACHINE_ERRORS = (OSError, MemoryError)
"""Errors of this machine, not of the checkpoint: an older checkpoint would fail as well."""


def load_shard(path: Path) -> dict[str, Any]:
    """Return what one rank saved, its tensors mapped from the file. No pickled code is run."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if any(tensor.nbytes > path.stat().st_size for tensor in content["tensors"].values()):
        raise ValueError("a tensor is larger than its file")
    return content
