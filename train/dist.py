"""The processes of a run and what they do together: join, agree, leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from train.contract import Exit
from train.ending import leave
from train.errors import TrainError, UsageError

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""How long a collective may wait before the process group gives up."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is. All 0 and 1 without torchrun."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"

    @property
    def node_rank(self) -> int:
        """The global rank of local rank 0 on this node: torchrun numbers the ranks of a node one after the other."""
        return self.rank - self.local_rank


def join(env: Mapping[str, str]) -> Ranks:
    """Take the device of this process and, under torchrun, join the others (NCCL on GPUs, else gloo).

    Raises UsageError if there are more processes than GPUs.
    """
    rank, world, local = (int(env.get(name, default)) for name, default in _TORCHRUN)
    device = _device(local)
    if "RANK" not in env:
        return Ranks(device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device if backend == "nccl" else None)
    return Ranks(rank, world, local, device, backend)


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(f"process {local_rank} of this node has no GPU: there are {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def once_per_node(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns on the first process of this node, on all of its processes; the others wait.

    An error of ours on any node is raised on every rank alike, so that no rank waits for one that has gone.
    """
    result: T | None = None
    error: TrainError | None = None
    if ranks.local_rank == 0:
        try:
            result = work()
        except TrainError as caught:
            error = caught
    results = gather(ranks, (result, error))
    for _, theirs in results:
        if theirs is not None:
            raise theirs
    return results[ranks.node_rank][0]  # type: ignore[return-value]  # local rank 0 has set it, or raised


def gather(ranks: Ranks, value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks. `value` must be picklable."""
    if ranks.world == 1:
        return [value]
    values: list[T] = [value] * ranks.world
    dist.all_gather_object(values, value)
    return values


def mean(ranks: Ranks, values: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks, element by element, in place."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values /= ranks.world
    return values


def finish(ranks: Ranks) -> NoReturn:
    """Leave after success. gloo with DDP aborts in some clean interpreter exits: so wait for all, take the group down,
    flush and go without one. After an error the group must not be destroyed, as that can deadlock: `leave`."""
    if dist.is_initialized():
        dist.barrier(device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
        dist.destroy_process_group()
    leave(Exit.OK)
