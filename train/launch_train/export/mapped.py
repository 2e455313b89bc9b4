"""Tensors of a checkpoint, mapped from files: whatever their size, the host's memory stays free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch_train.checkpointing.partition import State, join
from launch_train.distributed.dtensor import Region, fill, saved_tensors


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
