"""A state as a checkpoint has it: its tensors apart from the rest, shared out among the ranks, in the host's memory."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launch_train.distributed import dtensor

State = dict[str, Any]
"""Entries by name, of nested dicts and lists: tensors and plain values."""

REF = "$tensor"
"""Key of the dict that stands for a tensor in the rest: its value is the tensor's path."""


class Split(NamedTuple):
    """A state as its tensors by path (`optimizer/state/0/exp_avg`), each storage once, and the rest around them."""

    tensors: dict[str, Tensor]
    rest: Any


def split(state: Any) -> Split:
    """Take the tensors out of nested dicts, lists and tuples. Two names of one tensor (tied weights) share a path."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            here = dtensor.local(value)
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


def joined(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """What `split` took apart. Raises KeyError if a tensor is missing."""
    if isinstance(rest, Mapping):
        if rest.keys() == {REF}:
            return tensors[rest[REF]]
        return {key: joined(tensors, item) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)([joined(tensors, item) for item in rest])
    return rest


def references(rest: Any) -> set[str]:
    """Return the paths of all tensors that `joined` needs."""
    if isinstance(rest, Mapping):
        if rest.keys() == {REF}:
            return {rest[REF]}
        rest = list(rest.values())
    return set().union(*map(references, rest)) if isinstance(rest, (list, tuple)) else set()


def shared_out(tensors: Mapping[str, Tensor], world: int, first_only: Collection[str]) -> list[list[str]]:
    """Paths for each rank to save, balanced by size; the same on all ranks. `first_only` are rank 0's: what isn't the
    same on every rank (batch norm's running averages, plain values of a script), and may not even be there."""
    shares: list[list[str]] = [[] for _ in range(world)]
    shares[0] = sorted(path for path in tensors if path in first_only)
    bytes_of = [0] * world  # without those, which another rank may not have
    for path in sorted(tensors.keys() - shares[0], key=lambda path: (-tensors[path].nbytes, path)):
        rank = bytes_of.index(min(bytes_of))
        shares[rank].append(path)
        bytes_of[rank] += tensors[path].nbytes
    return shares


class Share(NamedTuple):
    """What one rank saves: tensors by path, and of which wholes some of them are parts (as pieces.described)."""

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, list[int]]]


def share(tensors: Mapping[str, Tensor], rank: int, world: int, first_only: Collection[str]) -> Share:
    """Of those that every rank has: this rank's, as `shared_out`. Of those that are shared out already: its parts."""
    split_up = {path: tensor for path, tensor in tensors.items() if dtensor.is_shared_out(tensor)}
    alike = {path: tensor for path, tensor in tensors.items() if path not in split_up}
    mine = {path: alike[path] for path in shared_out(alike, world, first_only)[rank]}
    parts = {path: part for path, tensor in split_up.items() if (part := dtensor.local(tensor)).numel()}
    return Share(mine | parts, {path: dtensor.described(split_up[path]) for path in parts})


def covered(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum over the paths and sizes of these tensors, not their values. The checksums of all ranks' shares
    add up to the state's only if no tensor or part of one is missing."""
    return sum(tensor.numel() * zlib.crc32(path.encode()) for path, tensor in tensors.items())


class HostCopies:
    """Copies of tensors in the host's memory, in buffers that are kept for the next time.

    From a GPU the copies are queued in its own stream, so that the training step behind them waits for nothing else;
    `ready` waits until they are there.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying. The copies of the time before are overwritten."""
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
        return buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)  # else there is no event to wait for
