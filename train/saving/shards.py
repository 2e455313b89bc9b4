"""What the ranks saved, brought from the run folder to this machine: `train.saving.cutter`'s way back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train.saving.cutter import WORKERS, Part
from train.saving.manifests import CheckpointError, Manifest
from train.storage import Storage
from train.storage.sources import checksum


def fetch(storage: Storage, manifest: Manifest, folder: Path) -> list[Path]:
    """Bring a checkpoint's shards to local files, each part checked, several at once.

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


def _fetch_part(storage: Storage, folder: str, part: Part, path: Path, offset: int) -> None:
    try:
        data = storage.read(f"{folder}/{part.name}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}/{part.name} is missing") from error
    if len(data) != part.bytes or checksum(data) != part.crc32c:
        raise CheckpointError(f"{folder}/{part.name} is damaged: size or CRC32C is not the manifest's")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read(path: Path) -> dict[str, Any]:
    """What one rank saved, its tensors mapped from the file. No pickled code is ever run."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content
