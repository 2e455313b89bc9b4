"""Download and read what the ranks saved: the counterpart of `launch_train.checkpointing.multipart_writer`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.checkpointing.multipart_writer import WORKERS, CheckpointPart
from launch_train.common.storage import Storage
from launch_train.common.storage.bucket import checksum


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
    """Return what all ranks saved in the checkpoint `folder`, as `read`. Raises CheckpointError if it is incomplete."""
    from launch_train.checkpointing.partition import references
    from launch_train.distributed.dtensor import is_incomplete, saved_tensors

    try:
        saved = [read(path) for path in paths]
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
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{folder} is incomplete: missing, or partly missing: {', '.join(missing[:3])}{more}")
    return saved


_MACHINE_ERRORS = (OSError, MemoryError)
"""Errors of this machine, not of the checkpoint: an older checkpoint would fail as well."""


def read(path: Path) -> dict[str, Any]:
    """Return what one rank saved, its tensors mapped from the file. No pickled code is run."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if any(tensor.nbytes > path.stat().st_size for tensor in content["tensors"].values()):
        raise ValueError("a tensor is larger than its file")
    return content
