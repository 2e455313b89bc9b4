"""Checkpoints: files with their sizes and digests in a manifest, which is written last and makes them valid.

`torch.load` notices a lost byte but no flipped one, so a reader checks the digests first and trusts manifests only.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

from train import contract
from train.errors import TrainError
from train.storage import Storage

MANIFEST = "manifest.json"


class CheckpointError(TrainError):
    """A checkpoint that is not there, or is not what its manifest says."""


def folder(step: int) -> str:
    return f"{contract.CHECKPOINTS}/step-{step:08d}"


def save(storage: Storage, step: int, state: Mapping[str, Any], about: Mapping[str, Any], *, writer: str) -> str:
    """Write `state` (tensors and plain values) as the checkpoint of `step`, and return its name.

    `writer` is the sub-folder of this start of the run: two that write the same step don't mix. The first manifest
    stays: a checkpoint never changes.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    data, name = buffer.getvalue(), f"{writer}/state.pt"
    storage.write(f"{folder(step)}/{name}", data)
    files = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    manifest = json.dumps({"step": step, "files": files, **about}, indent=1).encode()
    try:
        storage.write(f"{folder(step)}/{MANIFEST}", manifest, create=True)
    except FileExistsError:
        print(f"{folder(step)} was there already and stays as it is", flush=True)
    return folder(step)


def load(storage: Storage, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state and the manifest of a step's checkpoint, on the CPU. Raises CheckpointError."""
    import torch

    try:
        manifest = json.loads(storage.read(f"{folder(step)}/{MANIFEST}"))
        files = {name: storage.read(f"{folder(step)}/{name}") for name in manifest["files"]}
    except FileNotFoundError as error:
        raise CheckpointError(f"{storage.url} has no complete checkpoint of step {step}: {error}") from error
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != manifest["files"][name]["sha256"]:
            raise CheckpointError(f"{storage.url}/{folder(step)}/{name} is damaged: its sha256 is not the manifest's")
    state: dict[str, Any] = {}
    for data in files.values():
        state |= torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return state, manifest
