"""The processes of a run and what they do together: join, agree, leave."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports them, untyped
from torch.distributed.rendezvous import rendezvous

from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.errors import TrainError, UnfitError
from launch_train.common.process_exit import leave

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""How long a collective may wait before the process group gives up: at the start, and later where no node watches for
hangs."""

WATCHED_SECONDS = 2 * 3600.0
"""The same in training where a node does: above the longest that it allows, 30 minutes for a rare step and 30 more for
a compilation (loop.RARE_SECONDS, hangs.COMPILE_S). A shorter timeout would end a run whose ranks wait, as they may, for
one that waits for its data; the node ends one that hangs long before, and keeps its stacks."""

PATIENCE = 6 * 3600.0
"""Seconds that the ranks wait for work of one of them that has no bound of its own: preparing data, a checkpoint."""

FIRST_POLL_SECONDS, POLL_SECONDS = 0.001, 0.1
"""Between two looks for the other ranks: short at first, as most often they come together."""

LATE_SECONDS = 60.0
"""Time after which a rank that waits for the others may report it."""

MOMENT = 1.0
"""Seconds that another rank gives rank 0 to say what is wrong."""


@dataclass(frozen=True)
class Ranks:
    """Which process this is. All 0 and 1 without torchrun."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    store: Store | None = field(default=None, compare=False)
    """Where the ranks meet without a collective; None without torchrun."""
    meetings: Iterator[int] = field(default_factory=itertools.count, compare=False)
    nodes: int = 1

    @property
    def node_rank(self) -> int:
        """The global rank of local rank 0 on this node: torchrun numbers the ranks of a node one after the other."""
        return self.rank - self.local_rank


def join(env: Mapping[str, str]) -> Ranks:
    """Take the device of this process and, under torchrun, join the others (NCCL on GPUs, else gloo).

    Raises UnfitError if this process has no GPU where the node has some.
    """
    rank, world, local = (int(env.get(name, default)) for name, default in _TORCHRUN)
    device = _device(local, int(env.get(contract.VISIBLE_GPUS) or 0))
    if "RANK" not in env:
        return Ranks(device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    _same_network(os.environ)
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    group = PrefixStore("group", store)
    given = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=TIMEOUT, store=group, rank=rank, world_size=world, device_id=given)
    nodes = max(1, world // int(env.get("LOCAL_WORLD_SIZE") or world))
    return Ranks(rank, world, local, device, backend, PrefixStore("train", store), nodes=nodes)


def raise_timeout(timeout: timedelta) -> None:
    """Let the collectives of all process groups wait longer from now on."""
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _same_network(environ: MutableMapping[str, str]) -> None:
    """gloo, in which the ranks agree also where NCCL carries the gradients, goes over the interface that NCCL was given
    by name: left alone it takes the one of the host's name, which in a container may be no way to another machine."""
    first = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=").partition(",")[0]
    if first in {name for _, name in socket.if_nameindex()}:  # for NCCL it may be the beginning of a name, too
        environ.setdefault("GLOO_SOCKET_IFNAME", first)


_TORCHRUN = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _device(local_rank: int, seen: int) -> torch.device:
    """This process's GPU (a Mac's too, for one process), or the CPU on a node that has `seen` none."""
    if not torch.cuda.is_available():
        if seen:
            raise UnfitError(
                f"this node has {seen} GPUs (nvidia-smi), but torch {torch.__version__} can't use them: "
                "it is built without CUDA or for a newer driver"
            )
        alone = int(os.environ.get("WORLD_SIZE") or 1) == 1  # gloo doesn't carry a Mac's GPU
        return torch.device("mps" if alone and torch.backends.mps.is_available() else "cpu")
    if local_rank >= torch.cuda.device_count():
        raise UnfitError(f"process {local_rank} of this node has no GPU: there are {torch.cuda.device_count()}")
    device = torch.device("cuda", local_rank)
    use_device(device)
    return device


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread.

    Every thread starts with GPU 0: without this the first CUDA call of a rank's background thread opens a context of
    some hundred MB on rank 0's GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def once_per_node(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns on the first process of this node, on all of its processes; the others wait.

    An error of ours, or of the files, on any node is raised on every rank alike, so that no rank waits for one that
    has gone.
    """
    return _results(ranks, ranks.local_rank == 0, work)[ranks.node_rank]


def on_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, on all ranks; its errors too, as in `once_per_node`."""
    return _results(ranks, ranks.rank == 0, work)[0]


def on_all(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on each rank and return all results on all ranks; errors too, as in `once_per_node`."""
    return _results(ranks, True, work)


def _results(ranks: Ranks, mine: bool, work: Callable[[], T]) -> list[T]:
    """What `work` returned on each rank that does it (`mine`); the others' places hold nothing of use."""
    result: T | None = None
    error: TrainError | None = None
    if mine:
        try:
            result = work()
        except TrainError as caught:
            error = caught
        except OSError as caught:
            error = TrainError(str(caught))
    meet(ranks)
    results = gather(ranks, (result, error))
    for _, theirs in results:
        if theirs is not None:
            raise theirs
    return [value for value, _ in results]  # type: ignore[misc]  # those who worked have set theirs, or raised


def meet(ranks: Ranks) -> None:
    """Wait for all ranks, for hours if need be: a collective would give up after TIMEOUT. Raises TrainError."""
    if ranks.store is None:
        return
    here = f"meeting/{next(ranks.meetings)}"
    ranks.store.set(f"{here}/{ranks.rank}", "")
    wait_for_keys(ranks.store, [f"{here}/{rank}" for rank in range(ranks.world)])


def wait_for_keys(store: Store, keys: list[str], late: Callable[[], None] = lambda: None) -> None:
    """Wait until all ranks have set theirs, for hours if need be. `late` is called once, after LATE_SECONDS. Raises
    TrainError."""
    began, said, pause = time.monotonic(), False, FIRST_POLL_SECONDS
    while not store.check(keys):  # not wait(): in it no signal would be heard
        waited = time.monotonic() - began
        if waited > PATIENCE:
            raise TrainError(f"not all ranks came within {PATIENCE / 3600:g} hours")
        if waited > LATE_SECONDS and not said:
            said = True
            late()
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def speaks(ranks: Ranks | None, error: BaseException) -> bool:
    """Whether this rank prints its error.

    One of ours: rank 0 does, and, where rank 0 has none, the first of the others; but not what another rank has said in
    the same words. Of torch's RuntimeErrors those don't count that come when another rank has said why it ends: what
    they tell of is that it has gone. `ranks` is None before `join`: the error is then this process's own.
    """
    if ranks is None or ranks.store is None:
        return True
    ours, first = isinstance(error, TrainError), ranks.rank == 0
    with suppress(RuntimeError):  # the store is gone, and so is rank 0
        if isinstance(error, RuntimeError) or (ours and not first):
            _wait_for(ranks.store, _SAID, MOMENT)
        same = ranks.store.add(f"{_SAID}/{error}", 1) > 1
        alone = ranks.store.add(_SAID, 1) == 1
        return (alone or first) and not same if ours else alone or not (same or isinstance(error, RuntimeError))
    return first


_SAID = "said"


def _wait_for(store: Store, key: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not store.check([key]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 5)


def gather(ranks: Ranks, value: T) -> list[T]:
    """Every rank's `value`, in the order of the ranks. `value` must be picklable."""
    if ranks.world == 1:
        return [value]
    values: list[T] = [value] * ranks.world
    dist.all_gather_object(values, value)
    return values


def gather_tensors(ranks: Ranks, values: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, all of one shape, in the order of the ranks."""
    if ranks.world == 1:
        return [values]
    everybody = [torch.empty_like(values) for _ in range(ranks.world)]
    dist.all_gather(everybody, values)
    return everybody


def mean(ranks: Ranks, values: torch.Tensor) -> torch.Tensor:
    """The mean over all ranks, element by element, in place."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values /= ranks.world
    return values


def same_buffers(ranks: Ranks, model: torch.nn.Module) -> None:
    """Give all ranks rank 0's buffers, as DDP does before each forward pass in training: batch norm's running averages
    are each rank's own after one. Doing it again changes no bit."""
    if ranks.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def finish(ranks: Ranks) -> NoReturn:
    """Leave after success. gloo with DDP aborts in some clean interpreter exits: so wait for all, take the group down,
    flush and go without one. After an error the group must not be destroyed, as that can deadlock: `leave`."""
    if dist.is_initialized():
        dist.barrier(device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
        dist.destroy_process_group()
    leave(Exit.OK)
