"""What a checkpoint is: numbered parts, and a manifest with their sizes and digests, which is written last and makes
them valid.

A step's folder has a sub-folder for each start of the run that saved it, so that two never mix:

    checkpoints/step-00000300/0001-0002/rank-00000-0000.part …    what rank 0 saved: a torch.save file, in pieces
    checkpoints/step-00000300/0001-0002/manifest.json             sizes and digests; there once everything else is

`torch.load` notices a lost byte but no flipped one, so a reader checks the digests first and trusts manifests only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launch_train.checkpointing.multipart_writer import Part
from launch_train.common import contract
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.storage import Storage

FORMAT = 1
"""Counts up when an older launch could not read what is written."""

OLD_MANIFEST = "/manifest.json"


class CheckpointError(TrainError):
    """A checkpoint that is not there, or is not what its manifest says."""


class Manifest(NamedTuple):
    """What makes a checkpoint: `shards` has each rank's parts in their order, `about` what the run said of itself."""

    step: int
    start: str
    shards: tuple[tuple[Part, ...], ...]
    about: dict[str, Any]

    @property
    def folder(self) -> str:
        return contract.checkpoint_folder(self.step, self.start)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for shard in self.shards for part in shard)


# --- Writing --------------------------------------------------------------------------------------------------------


def commit(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint valid: all of its parts are there. Raises FileExistsError if another one is in its place."""
    name = contract.manifest(manifest.step, manifest.start)
    storage.write(name, encoded(manifest), create=True)


def encoded(manifest: Manifest) -> bytes:
    """As JSON, the digest of all the rest in the last line: a manifest too may be damaged."""
    shards = [[part._asdict() for part in shard] for shard in manifest.shards]
    data = {"format": FORMAT, "step": manifest.step, "start": manifest.start, "shards": shards, "about": manifest.about}
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# --- Reading --------------------------------------------------------------------------------------------------------


def listed(names: Iterable[str]) -> list[str]:
    """The manifests among the names of a run folder, the newest step and start first.

    Raises UsageError if there are checkpoints of a version before manifests had a start.
    """
    found = [(match["step"], match["start"], name) for name in names if (match := contract.MANIFEST.match(name))]
    if not found and (old := [name for name in names if name.endswith(OLD_MANIFEST)]):
        raise UsageError(_other_version(old[0], 0))
    return [name for _, _, name in sorted(found, reverse=True)]


def _other_version(name: str, version: object) -> str:
    return (
        f"{name} was written by another version of launch (format {version}, this one reads {FORMAT}): "
        "go on with that version, or begin a new run (--new)"
    )


def read(storage: Storage, name: str) -> Manifest:
    """Raises CheckpointError if it is damaged or isn't there, and UsageError if another version wrote it."""
    try:
        data = json.loads(storage.read(name))
        digest = data.pop("sha256")
        whole = digest == _digest(data)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is gone") from error
    if not whole:
        raise CheckpointError(f"{name} is damaged: its digest is not that of its content")
    if data.get("format", FORMAT) != FORMAT:
        raise UsageError(_other_version(name, data["format"]))
    try:
        shards = tuple(tuple(Part(**part) for part in shard) for shard in data["shards"])
        manifest = Manifest(data["step"], data["start"], shards, data["about"])
        wanted = contract.manifest(manifest.step, manifest.start)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{name} is not a launch manifest: {type(error).__name__}: {error}") from error
    if name != wanted:
        raise CheckpointError(f"{name} is that of another checkpoint ({manifest.folder})")
    return manifest
