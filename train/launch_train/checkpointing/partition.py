"""Split a state into tensors and the rest, distribute the tensors over the ranks, and copy them to host memory."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launch_train.common.console import say
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
    """One rank's share: tensors by path, and for those that are parts, their place (see dtensor.saved_tensors)."""

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, list[int]]]


def rank_share(tensors: Mapping[str, Tensor], rank: int, world: int, first_only: Collection[str]) -> Share:
    """Return this rank's share of the replicated tensors, and its parts of the sharded ones."""
    sharded = {path: tensor for path, tensor in tensors.items() if dtensor.is_sharded(tensor)}
    replicated = {path: tensor for path, tensor in tensors.items() if path not in sharded}
    mine = {path: replicated[path] for path in assign_to_ranks(replicated, world, first_only)[rank]}
    parts = {path: part for path, tensor in sharded.items() if (part := dtensor.local_part(tensor)).numel()}
    offsets = {path: dtensor.local_region(sharded[path]).offset for path in parts}
    places = {path: {"at": list(offset), "of": list(sharded[path].shape)} for path, offset in offsets.items()}
    return Share(mine | parts, places)


def coverage_checksum(tensors: Mapping[str, Tensor]) -> int:
    """Return a checksum over the paths and sizes of these tensors, not their values. The checksums of all ranks' shares
    add up to the state's only if no tensor or part of one is missing."""
    return sum(tensor.numel() * zlib.crc32(path.encode()) for path, tensor in tensors.items())


ALIGNMENT = 64
"""Bytes: a cache line, and what torch aligns its own tensors on the CPU to."""


class HostCopies:
    """Copies of tensors in host memory, in segments that are reused.

    torch rounds each request for pinned memory up to a power of two, which is up to twice a tensor, and keeps it for
    the next request of that size. So tensors share segments whose sizes are powers of two: together they take an eighth
    more than the state at most, unless it has tensors that are larger than the gaps which they leave (in the extreme,
    one alone).

    Copies from a GPU are queued in its current stream, so that the next training step waits for nothing else; `ready`
    waits until they are complete.
    """

    def __init__(self) -> None:
        self._segments: list[torch.UntypedStorage] = []
        self._copies: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None
        self._pinnable = True

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying; earlier copies are overwritten."""
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        layout = [(path, tensor.shape, tensor.dtype) for path, tensor in tensors.items()]
        if layout != [(path, copy.shape, copy.dtype) for path, copy in self._copies.items()]:
            self._copies = self._lay_out(tensors, pin=on_gpu)
        for path, tensor in tensors.items():  # without a GPU there is no event to wait for
            self._copies[path].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        if on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record()
        return self._copies

    def ready(self) -> None:
        if self._event:
            self._event.synchronize()

    def _lay_out(self, tensors: Mapping[str, Tensor], *, pin: bool) -> dict[str, Tensor]:
        """Return a place for each tensor: the largest first, in the segments that exist, then in new ones."""
        waiting = sorted((path for path in tensors if tensors[path].nbytes), key=lambda path: -tensors[path].nbytes)
        sizes = {path: -(-tensors[path].nbytes // ALIGNMENT) * ALIGNMENT for path in waiting}
        places: dict[str, Tensor] = {}
        number, whole = 0, sum(sizes.values())
        while waiting:
            if number == len(self._segments):
                total = sum(sizes[path] for path in waiting)
                size = 1 << (total.bit_length() - 1)
                if sizes[waiting[0]] > size or total >= size * 16 / 9 or size < whole / 16:
                    size = 1 << (total - 1).bit_length()  # one segment takes all that is left
                self._segments.append(self._new_segment(size, pin=pin))
            segment, end, later = self._segments[number], 0, []
            for path in waiting:
                if end + sizes[path] > segment.nbytes():
                    later.append(path)
                    continue
                # A storage for each: torch.save writes the whole storage of a view.
                storage, tensor = segment[end : end + tensors[path].nbytes], tensors[path]
                places[path] = torch.empty(0, dtype=tensor.dtype).set_(storage).view(tensor.shape)
                end += sizes[path]
            waiting, number = later, number + 1
        return {
            path: places[path] if path in places else torch.empty(tensor.shape, dtype=tensor.dtype)
            for path, tensor in tensors.items()
        }

    def _new_segment(self, size: int, *, pin: bool) -> torch.UntypedStorage:
        """Return pinned memory if `pin`, until no more of it is available."""
        if pin and self._pinnable:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True).untyped_storage()
            except RuntimeError as error:
                self._pinnable = False
                reason = str(error).partition("\n")[0]
                say(f"pinned host memory is not available ({reason}); training waits longer for each checkpoint's copy")
        return torch.empty(size, dtype=torch.uint8).untyped_storage()
