"""Write safetensors, torch and DCP files.

Tensors of a checkpoint are mapped from files: whatever their size, the host's memory stays free.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch_train.checkpointing.manifest import Manifest
from launch_train.checkpointing.partition import State, join
from launch_train.common.errors import UsageError
from launch_train.distributed.dtensor import Region, fill, saved_tensors

Writer = Callable[[Manifest, Sequence[Mapping[str, Any]], Path, Path], list[str]]
"""Writes a checkpoint's shards, with a folder for temporary files, to a folder. Returns what was left out."""


def prepare(kind: str, about: Mapping[str, Any], *, weights_only: bool) -> Writer:
    """Return the writer of safetensors, torch or dcp. Raises UsageError: dcp without the optimizer's names."""
    if kind == "dcp" and not is_script(about) and not weights_only:
        trained(about)  # refused before the download
    write = _write_script if is_script(about) else _write_model
    return lambda manifest, shards, scratch, folder: write(
        kind, manifest, state_of(shards, scratch), folder, weights_only
    )


def is_script(about: Mapping[str, Any]) -> bool:
    """Return whether a custom script wrote the checkpoint (launch_train.checkpoint)."""
    return "script" in about


def trained(about: Mapping[str, Any]) -> list[str]:
    """Return the names of the trained parameters, in the optimizer's order. Raises UsageError if they are unknown."""
    if "trained" not in about:
        raise UsageError(
            "the optimizer's state can't be exported: an older version of launch wrote this checkpoint, without the "
            "names of its parameters; use --weights-only, or resume the run once"
        )
    names: list[str] = about["trained"]
    return names


# --- The built-in trainer's checkpoints -------------------------------------------------------------------------------


def _write_model(kind: str, manifest: Manifest, state: State, folder: Path, weights_only: bool) -> list[str]:
    about, model = manifest.about, state["model"]
    if kind == "safetensors":
        save_safetensors(model, folder / "model.safetensors")
    elif kind == "torch":
        torch.save(model, folder / "model.pt")
    else:
        saved = {"model": model}
        if not weights_only:  # by parameter name, as torch's get_optimizer_state_dict returns it
            names, optimizer = trained(about), state["optimizer"]
            groups = [
                {**group, "params": [names[number] for number in group["params"]]}
                for group in optimizer["param_groups"]
            ]
            moments = {names[number]: parameter for number, parameter in optimizer["state"].items()}
            saved["optimizer"] = {"state": moments, "param_groups": groups}
        _save_dcp(saved, folder)
    return []


def save_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file. A tied weight is stored once, under its first name; the metadata's `tied`
    (JSON) has the other names."""
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    tied = {name: first[id(tensor)] for name, tensor in tensors.items() if first.setdefault(id(tensor), name) != name}
    stored = {name: tensor for name, tensor in tensors.items() if name not in tied}
    save_file(stored, path, {"format": "pt", **({"tied": json.dumps(tied)} if tied else {})})


def _save_dcp(state: State, folder: Path) -> None:
    import warnings

    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            checkpoint.state_dict_saver.save(state, checkpoint_id=os.fspath(folder), no_dist=True)
        except CheckpointException as error:  # not an Exception
            raise RuntimeError(str(error)) from error


# --- A custom script's ------------------------------------------------------------------------------------------------


def _write_script(kind: str, manifest: Manifest, state: State, folder: Path, weights_only: bool) -> list[str]:
    """Write each state dict to a separate file; skip anything else."""
    from launch_train.script_api.encoding import decode

    decoded: State = decode(state)
    if kind == "dcp":
        _save_dcp(decoded, folder)
        return []
    entries = {}
    for name, value in decoded.items():
        if isinstance(value, Mapping) and _has_tensor(value):
            is_flat = all(isinstance(item, Tensor) for item in value.values())
            if _is_plain(value) if kind == "torch" else is_flat:  # as torch.load(weights_only=True) reads it
                entries[name] = value
    if not entries:
        what = "flat dict of tensors" if kind == "safetensors" else "state dict"
        raise UsageError(f"the script's checkpoint has no {what}, only {', '.join(decoded) or 'nothing'}")
    for name, value in entries.items():
        if not re.fullmatch(r"\w[\w. -]{0,99}", str(name)):
            raise UsageError(f"the state's name {str(name)[:100]!r} can't be the name of a file; use --format dcp")
        if kind == "safetensors":
            save_safetensors(value, folder / f"{name}.safetensors")
        else:
            torch.save(value, folder / f"{name}.pt")
    left = [name for name in decoded if name not in entries]
    return [f"not exported, as the format can't hold them: {', '.join(left)}"] if left else []


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for each in (*value.keys(), *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor) or type(value) in (bool, int, float, str, torch.dtype)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


# --- Tensors in files -------------------------------------------------------------------------------------------------


def state_of(shards: Sequence[Mapping[str, Any]], folder: Path) -> State:
    """Return the state that the ranks saved, its tensors contiguous and mapped from files.

    Tied weights are the same object. `folder` takes the files of tensors that were saved in parts.
    """
    tensors: dict[str, Tensor] = {}
    for path, saved in saved_tensors(shards).items():
        (_, tensor), *others = saved.parts
        if others or tuple(tensor.shape) != saved.shape or not tensor.is_contiguous():
            everything = Region((0,) * len(saved.shape), saved.shape)
            tensor = fill(empty(saved.shape, tensor.dtype, folder), everything, saved)
        tensors[path] = tensor
    state: State = join(tensors, shards[0]["rest"])
    return state


def empty(shape: Sequence[int], dtype: torch.dtype, folder: Path) -> Tensor:
    """Return a tensor of zeros in a new file, which is deleted with the tensor. Raises OSError if the disk is full."""
    count = prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        size = count * dtype.itemsize
        if hasattr(os, "posix_fallocate"):  # else a full disk would kill the process when the tensor is written
            os.posix_fallocate(handle, 0, size)
        else:
            os.truncate(handle, size)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(*shape)
    finally:
        os.close(handle)
        Path(name).unlink()


def copied(tensor: Tensor, folder: Path) -> Tensor:
    """Return a contiguous copy in a new file."""
    return empty(tensor.shape, tensor.dtype, folder).copy_(tensor)
