"""Batches as trees: a tensor, or tuples, lists and mappings of tensors. The first dimension is the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Tree = Any
"""A tensor, or a tuple, list or mapping of trees. Anything else (None, a string) is left unchanged."""


def map_tensors(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(item, change) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


def move_to(tree: Tree, device: torch.device) -> Tree:
    """Move to a device; to an NVIDIA GPU asynchronously, from pinned memory.

    Other copies must be synchronous: their result would be read before it is complete.
    """
    return map_tensors(tree, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device, to a GPU by pinned memory: other copies would wait for the GPU's queued work."""
    tensor = torch.from_numpy(array)
    return move_to(tensor.pin_memory() if device.type == "cuda" else tensor, device)  # type: ignore[no-any-return]  # a Tree may be anything; this one is a tensor


def tensors_of(tree: Tree) -> list[Tensor]:
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(tree, note)
    return tensors


def count_samples(tree: Tree) -> int:
    """Return the number of samples. Raises ValueError if the tree holds no tensor."""
    if not (tensors := tensors_of(tree)):
        raise ValueError("a batch without a tensor")
    return len(tensors[0])


def split(tree: Tree, size: int) -> list[Tree]:
    """Split into micro-batches of `size` samples; the last may have fewer."""
    parts = [slice(at, at + size) for at in range(0, count_samples(tree), size)]
    return [map_tensors(tree, itemgetter(part)) for part in parts]
