"""Split a state into tensors and the rest, distribute the tensors over the ranks, and copy them to host memory."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launch_train.distributed import dtensor

State = dict[str, Any]
"""Nested dicts and lists of tensors and plain values, by name."""

REF = "$tensor"
"""Key of the dict that represents a tensor in the rest; its value is the tensor's path."""


class Split(NamedTuple):
    """A state as tensors by path (`optimizer/state/0/exp_avg`), each storage once, and the structure around them."""

    tensors: dict[str, Tensor]
    rest: Any


def split(state: Any) -> Split:
    """Separate the tensors from nested dicts, lists and tuples. Tied weights share a path."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            here = dtensor.local_part(value)
            same = (here.data_ptr(), value.shape, value.stride())
            first = seen.setdefault(same, path) if here.numel() else path
            tensors.setdefault(first, value)
            return {REF: first}
        if isinstance(value, Mapping):
            return {key: walk(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([walk(item, f"{path}/{number}") for number, item in enumerate(value)])
        return value

    rest = walk(state, "")
    return Split(tensors, rest)


def join(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Return the state that `split` separated. Raises KeyError if a tensor is missing."""
    if isinstance(rest, Mapping):
        if rest.keys() == {REF}:
            return tensors[rest[REF]]
        return {key: join(tensors, item) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)([join(tensors, item) for item in rest])
    return rest


def references(rest: Any) -> set[str]:
    """Return the paths of all tensors that `joined` needs."""
    if isinstance(rest, Mapping):
        if rest.keys() == {REF}:
            return {rest[REF]}
        rest = list(rest.values())
    return set().union(*map(references, rest)) if isinstance(rest, (list, tuple)) else set()


def assign_to_ranks(tensors: Mapping[str, Tensor], world: int, first_only: Collection[str]) -> list[list[str]]:
    """Return the paths that each rank saves, balanced by size; the same on all ranks.

    `first_only` are rank 0's: tensors that differ by rank (batch norm's running averages, plain values of a script), or
    that another rank may not have.
    """
    shares: list[list[str]] = [[] for _ in range(world)]
    shares[0] = sorted(path for path in tensors if path in first_only)
    bytes_of = [0] * world  # without first_only, which other ranks may not have
    for path in sorted(tensors.keys() - shares[0], key=lambda path: (-tensors[path].nbytes, path)):
        rank = bytes_of.index(min(bytes_of))
        shares[rank].append(path)
        bytes_of[rank] += tensors[path].nbytes
    return shares


class Share(NamedTuple):
    """One rank's share: tensors by path, and for those that are parts, their place (see dtensor.describe_part)."""

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, list[int]]]


def rank_share(tensors: Mapping[str, Tensor], rank: int, world: int, first_only: Collection[str]) -> Share:
    """Return this rank's share of the replicated tensors, and its parts of the sharded ones."""
    sharded = {path: tensor for path, tensor in tensors.items() if dtensor.is_sharded(tensor)}
    replicated = {path: tensor for path, tensor in tensors.items() if path not in sharded}
    mine = {path: replicated[path] for path in assign_to_ranks(replicated, world, first_only)[rank]}
    parts = {path: part for path, tensor in sharded.items() if (part := dtensor.local_part(tensor)).numel()}
    return Share(mine | parts, {path: dtensor.describe_part(sharded[path]) for path in parts})


def coverage_checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum over the paths and sizes of these tensors, not their values. The checksums of all ranks' shares
    add up to the state's only if no tensor or part of one is missing."""
    return sum(tensor.numel() * zlib.crc32(path.encode()) for path, tensor in tensors.items())


class HostCopies:
    """Copies of tensors in host memory, in buffers that are reused.

    Copies from a GPU are queued in its current stream, so that the next training step waits for nothing else; `ready`
    waits until they are complete.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying; earlier copies are overwritten."""
        copies = {path: self._copy(path, tensor) for path, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record()
        return copies

    def ready(self) -> None:
        """Wait for the copies."""
        if self._event:
            self._event.synchronize()

    def _copy(self, path: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # without a GPU there is no event to wait for
