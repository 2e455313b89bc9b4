"""Batches as trees: a tensor, or tuples, lists and mappings of them, the first dimension being the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Tree = Any
"""A tensor, or a tuple, list or mapping of trees. Anything else (None, a text) is taken as it is."""


def mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The same tree with each tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: mapped(item, change) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(item, change) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(item, change) for item in tree)
    return tree


def to(tree: Tree, device: torch.device) -> Tree:
    """On a device; on an NVIDIA GPU, from pinned memory, without waiting. To the host, or a Mac's GPU, who doesn't wait
    reads what isn't there yet."""
    return mapped(tree, lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))


def there(array: NDArray[Any], device: torch.device) -> Tensor:
    """Numbers of the host on a device. They go by pinned memory: a copy from any other waits for what the GPU has yet
    to compute."""
    tensor = torch.from_numpy(array)
    return to(tensor.pin_memory() if device.type == "cuda" else tensor, device)  # type: ignore[no-any-return]


def samples(tree: Tree) -> int:
    """How many samples it has. Raises ValueError if it holds no tensor."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(tree, note)
    if not found:
        raise ValueError("a batch without a tensor")
    return len(found[0])


def split(tree: Tree, size: int) -> list[Tree]:
    """Micro-batches of `size` samples; the last one may have fewer."""
    return [mapped(tree, partial(_part, at, size)) for at in range(0, samples(tree), size)]


def _part(at: int, size: int, tensor: Tensor) -> Tensor:
    return tensor[at : at + size]
