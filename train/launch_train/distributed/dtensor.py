"""Sharded tensors (FSDP): this rank's part, and any part assembled from saved ones, whatever the number of ranks was.

Such a tensor is torch's DTensor. It is recognised by its methods, because importing its class takes as long as
importing torch itself; only runs that have some pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Region(NamedTuple):
    """Position of a part in the full tensor: offset and size, by dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


class SavedTensor(NamedTuple):
    """A saved tensor: the shape of the full tensor, and its parts, which may be mapped from files."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Region, Tensor], ...]


# --- Tensors of this run ----------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or all of one that isn't sharded."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. All ranks must call it together if it is sharded; on a GPU it doesn't synchronise."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def local_region(tensor: Tensor) -> Region:
    """Return the region of a sharded tensor that this rank has, maybe an empty one.

    Raises ValueError if it isn't sharded along exactly one dimension, as FSDP does it.
    """
    placements = tuple(cast(Any, tensor).placements)
    placement = placements[0]
    if len(placements) > 1 or not placement.is_shard():
        how = f"{placements}; only one Shard is supported, as from fully_shard over a one-dimensional mesh"
        raise ValueError(f"a tensor of {tuple(tensor.shape)} is sharded by {how}")
    mesh, size = cast(Any, tensor).device_mesh, tuple(local_part(tensor).shape)
    offset, rows = [0] * tensor.dim(), -(-tensor.shape[placement.dim] // mesh.size())
    offset[placement.dim] = min(mesh.get_local_rank() * rows, tensor.shape[placement.dim])
    return Region(tuple(offset), size)


# --- Saved tensors ----------------------------------------------------------------------------------------------------


def saved_tensors(shards: Sequence[Mapping[str, Any]]) -> dict[str, SavedTensor]:
    """Return all tensors of a checkpoint by path.

    `shards` are what the ranks saved: `tensors`, and in `parts` which of these are parts, with their offset (`at`) and
    the shape of the full tensor (`of`).
    """
    tensors: dict[str, SavedTensor] = {}
    for shard in shards:
        parts = shard.get("parts", {})
        for path, tensor in shard["tensors"].items():
            about = parts.get(path) or {"at": [0] * tensor.dim(), "of": tensor.shape}
            part = (Region(tuple(about["at"]), tuple(tensor.shape)), tensor)
            before = tensors[path].parts if path in tensors else ()
            tensors[path] = SavedTensor(tuple(about["of"]), (*before, part))
    return tensors


def is_incomplete(saved: SavedTensor) -> bool:
    return sum(prod(place.size) for place, _ in saved.parts) != prod(saved.shape)


def assemble(saved: SavedTensor) -> Tensor:
    """Return the full tensor on the CPU. Raises ValueError if parts are missing."""
    (_, first), *others = saved.parts
    if not others and tuple(first.shape) == saved.shape:
        return first.clone()  # in the same memory format
    everything = Region((0,) * len(saved.shape), saved.shape)
    return fill(torch.empty(saved.shape, dtype=first.dtype), everything, saved)


def load_like(target: Tensor | None, saved: SavedTensor) -> Tensor:
    """Return the saved tensor in the layout of `target`: this rank's part on its device, or the full tensor on the CPU.

    If the shapes differ it is the full tensor: loading it then fails with a better message. Raises ValueError if parts
    are missing.
    """
    if target is None or not is_sharded(target) or tuple(target.shape) != saved.shape:
        return assemble(saved)
    from torch.distributed.tensor import DTensor

    mesh, placements, here = cast(Any, target).device_mesh, cast(Any, target).placements, local_region(target)
    part = torch.empty(here.size, dtype=saved.parts[0][1].dtype, device=target.device)
    return DTensor.from_local(
        fill(part, here, saved), mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def fill(target: Tensor, here: Region, saved: SavedTensor) -> Tensor:
    """Copy into `target`, the region `here` of the full tensor, and return it; no more is read than that.

    Raises ValueError if the saved parts don't cover it.
    """
    filled = 0
    for there, values in saved.parts:
        common = overlap(here, there)
        if prod(common.size):
            target[_slices_within(common, here)].copy_(values[_slices_within(common, there)])
            filled += prod(common.size)
    if filled != target.numel():
        raise ValueError(f"the checkpoint has {filled} of {target.numel()} elements of a tensor of {saved.shape}")
    return target


def overlap(first: Region, second: Region) -> Region:
    """Return the intersection of two regions of one tensor; its size is 0 somewhere if there is none."""
    at = tuple(map(max, first.offset, second.offset))
    pairs = zip(first.offset, first.size, second.offset, second.size, strict=True)
    ends = [min(a + n, b + m) for a, n, b, m in pairs]
    return Region(at, tuple(max(0, end - begin) for begin, end in zip(at, ends, strict=True)))


def _slices_within(part: Region, outer: Region) -> tuple[slice, ...]:
    """Return `part` as slices of `outer`, which contains it."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(part.offset, part.size, outer.offset, strict=True))
