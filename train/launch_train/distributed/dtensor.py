"""Tensors that are shared out among the ranks (FSDP): the part that is here, and any part out of those that were saved,
by however many ranks.

Such a tensor is torch's DTensor. It is told by what it can do: importing its class takes as long as torch itself, and
is left to the runs that have some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a part lies in its whole: its first element and its size, both by dimension."""

    at: tuple[int, ...]
    size: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor as it was saved: the shape of the whole, and its parts. Those may be mapped from files."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Place, Tensor], ...]


# --- A tensor of this run ---------------------------------------------------------------------------------------------


def is_shared_out(tensor: Tensor) -> bool:
    """Whether this rank has only a part of it."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """What of it is here: its part, or all of it."""
    return cast(Any, tensor).to_local() if is_shared_out(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it. Of one that is shared out all ranks ask together; on a GPU none waits for that."""
    return cast(Any, tensor).full_tensor() if is_shared_out(tensor) else tensor


def placements(tensor: Tensor) -> tuple[Any, ...]:
    """Return the placements of a sharded tensor, by dimension of its mesh."""
    return tuple(cast(Any, tensor).placements)


def place(tensor: Tensor) -> Place:
    """Which part of a tensor that is shared out is here; maybe an empty one. Raises ValueError: it isn't shared out
    along one dimension, as FSDP does it."""
    placement = placements(tensor)[0]
    if len(placements(tensor)) > 1 or not placement.is_shard():
        way = f"{placements(tensor)}; only one Shard is supported, as from fully_shard over a one-dimensional mesh"
        raise ValueError(f"a tensor of {tuple(tensor.shape)} is sharded by {way}")
    mesh, size = cast(Any, tensor).device_mesh, tuple(local(tensor).shape)
    first, each = [0] * tensor.dim(), -(-tensor.shape[placement.dim] // mesh.size())
    first[placement.dim] = min(mesh.get_local_rank() * each, tensor.shape[placement.dim])
    return Place(tuple(first), size)


# --- Saved ones -------------------------------------------------------------------------------------------------------


def described(tensor: Tensor) -> dict[str, list[int]]:
    """What a checkpoint says of the part of a tensor that it has: where it begins, in a whole of which shape."""
    return {"at": list(place(tensor).at), "of": list(tensor.shape)}


def stored(shards: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """All tensors of a checkpoint by path. `shards` are what the ranks saved: `tensors`, and in `parts` which of these
    are parts (as `described`)."""
    found: dict[str, Stored] = {}
    for shard in shards:
        parts = shard.get("parts", {})
        for path, tensor in shard["tensors"].items():
            about = parts.get(path) or {"at": [0] * tensor.dim(), "of": tensor.shape}
            part = (Place(tuple(about["at"]), tuple(tensor.shape)), tensor)
            before = found[path].parts if path in found else ()
            found[path] = Stored(tuple(about["of"]), (*before, part))
    return found


def incomplete(saved: Stored) -> bool:
    """Return whether parts of it are missing."""
    return sum(prod(place.size) for place, _ in saved.parts) != prod(saved.shape)


def wholes(shards: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The same as whole tensors, none of which keeps a file open. Raises ValueError if parts are missing."""
    return {path: in_one(saved) for path, saved in stored(shards).items()}


def in_one(saved: Stored) -> Tensor:
    """The whole, on the CPU. Raises ValueError if parts are missing."""
    (_, first), *others = saved.parts
    if not others and tuple(first.shape) == saved.shape:
        return first.clone()  # in the same memory format
    everything = Place((0,) * len(saved.shape), saved.shape)
    return fill(torch.empty(saved.shape, dtype=first.dtype), everything, saved)


def like(target: Tensor | None, saved: Stored) -> Tensor:
    """The saved tensor as `target` is: only the part that is here, on its device, or the whole on the CPU.

    Of other shapes it is the whole, too: whoever puts it into a model says better what doesn't fit. Raises ValueError
    if parts are missing.
    """
    if target is None or not is_shared_out(target) or tuple(target.shape) != saved.shape:
        return in_one(saved)
    from torch.distributed.tensor import DTensor

    mesh, placements, here = cast(Any, target).device_mesh, cast(Any, target).placements, place(target)
    part = torch.empty(here.size, dtype=saved.parts[0][1].dtype, device=target.device)
    return DTensor.from_local(
        fill(part, here, saved), mesh, placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def fill(target: Tensor, here: Place, saved: Stored) -> Tensor:
    """Copy into `target`, which is the part `here` of the whole, what the saved parts have of it; no more is read than
    that. Returns it. Raises ValueError if that isn't all."""
    filled = 0
    for there, values in saved.parts:
        common = overlap(here, there)
        if prod(common.size):
            target[_within(common, here)].copy_(values[_within(common, there)])
            filled += prod(common.size)
    if filled != target.numel():
        raise ValueError(f"of {target.numel()} numbers of a tensor of {saved.shape} the checkpoint has {filled}")
    return target


def overlap(one: Place, other: Place) -> Place:
    """What two parts of the same whole have in common; a size of 0 somewhere if there is nothing. Pure."""
    at = tuple(map(max, one.at, other.at))
    ends = [min(a + n, b + m) for a, n, b, m in zip(one.at, one.size, other.at, other.size, strict=True)]
    return Place(at, tuple(max(0, end - begin) for begin, end in zip(at, ends, strict=True)))


def _within(part: Place, outer: Place) -> tuple[slice, ...]:
    """`part` as slices of `outer`, in which it lies."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(part.at, part.size, outer.at, strict=True))
