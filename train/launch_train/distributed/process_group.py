"""The process group of a run: joining, barriers, gathers and exit."""

from __future__ import annotations

import itertools
import os
import re
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
from launch_train.common.errors import TrainError, UnfitError, UsageError
from launch_train.common.process_exit import exit_process

T = TypeVar("T")

TIMEOUT = timedelta(seconds=300)
"""Timeout of a collective at the start, and throughout where no node detects hangs."""

WATCHED_SECONDS = 2 * 3600.0
"""Timeout of a collective in training where a node detects hangs: above the longest hang limit, which is 30 minutes for
a rare step and 30 more for a compilation (loop.RARE_SECONDS, hangs.COMPILE_S).

A shorter timeout would end a run whose ranks wait, as they may, for one that waits for its data. The node ends a hung
run long before, and keeps its stacks.
"""

SCRIPT_TIMEOUT = timedelta(minutes=30)
"""Timeout of a collective in a custom script: torch's own default for gloo. Its ranks may wait for one that evaluates.
"""

BARRIER_SECONDS = 6 * 3600.0
"""Limit of `barrier`: the ranks may wait for work of one of them that has no bound, such as preparing data."""

FIRST_POLL_SECONDS, POLL_SECONDS = 0.001, 0.1
"""Poll interval of `barrier`: short at first, as the ranks most often arrive together."""

LATE_SECONDS = 60.0
"""Time after which a rank that waits for the others may report it."""

REPORT_SECONDS = 1.0
"""Seconds that other ranks give rank 0 to report an error."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process. Without torchrun: rank 0 of 1."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    store: Store | None = field(default=None, compare=False)
    """The store of barriers, which needs no collective; None without torchrun."""
    barriers: Iterator[int] = field(default_factory=itertools.count, compare=False)
    nodes: int = 1

    @property
    def node_rank(self) -> int:
        """The global rank of local rank 0 on this node: torchrun numbers the ranks node by node."""
        return self.rank - self.local_rank


def join(env: Mapping[str, str]) -> Ranks:
    """Select this process's device and, under torchrun, join the process group (NCCL on GPUs, else gloo).

    Raises UnfitError if the node has GPUs but this process can't use one, and UsageError for a bad memory limit.
    """
    rank, world, local = (int(env.get(name) or 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _device(local, int(env.get(contract.VISIBLE_GPUS) or 0))
    limit_memory(device, env)
    if "RANK" not in env:
        return Ranks(device=device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    _use_nccl_interface_for_gloo(os.environ)
    store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    group = PrefixStore("group", store)
    gpu = device if backend == "nccl" else None
    dist.init_process_group(backend, timeout=TIMEOUT, store=group, rank=rank, world_size=world, device_id=gpu)
    nodes = max(1, world // int(env.get("LOCAL_WORLD_SIZE") or world))
    return Ranks(rank, world, local, device, backend, PrefixStore("train", store), nodes=nodes)


def joined(env: Mapping[str, str]) -> Ranks:
    """Return the ranks of the process group that a script has joined by itself; without one, rank 0 of 1."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not dist.is_initialized() or (world := dist.get_world_size()) == 1:
        return Ranks(device=device)
    store = PrefixStore("launch", dist.distributed_c10d._get_default_store())
    return Ranks(dist.get_rank(), world, int(env.get("LOCAL_RANK") or 0), device, dist.get_backend(), store)


def raise_timeout(timeout: timedelta) -> None:
    """Let the collectives of all process groups wait longer from now on."""
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def _use_nccl_interface_for_gloo(environ: MutableMapping[str, str]) -> None:
    """Make gloo use the network interface that is set for NCCL.

    The ranks use gloo to agree on steps even where NCCL carries the gradients. By default gloo takes the interface of
    the host name, which in a container may not reach another machine.
    """
    first = environ.get("NCCL_SOCKET_IFNAME", "").removeprefix("=").partition(",")[0]
    if first in {name for _, name in socket.if_nameindex()}:  # NCCL also accepts a name's prefix
        environ.setdefault("GLOO_SOCKET_IFNAME", first)


def _device(local_rank: int, visible_gpus: int) -> torch.device:
    """Return this process's GPU (also a Mac's, for one process), or the CPU on a node without GPUs."""
    if not torch.cuda.is_available():
        if visible_gpus:
            raise UnfitError(
                f"this node has {visible_gpus} GPUs (nvidia-smi), but torch {torch.__version__} can't use them: "
                "it was built without CUDA, or for a newer driver"
            )
        alone = int(os.environ.get("WORLD_SIZE") or 1) == 1  # gloo doesn't support a Mac's GPU
        return torch.device("mps" if alone and torch.backends.mps.is_available() else "cpu")
    if local_rank >= torch.cuda.device_count():
        raise UnfitError(f"process {local_rank} of this node has no GPU: only {torch.cuda.device_count()} are visible")
    device = torch.device("cuda", local_rank)
    use_device(device)
    return device


def limit_memory(device: torch.device, env: Mapping[str, str]) -> None:
    """Limit torch's tensors to the spec's machine.gpu_memory_gb, if it is set; beyond it torch reports an out of
    memory. What CUDA and NCCL take by themselves does not count. Raises UsageError."""
    if not (text := env.get(contract.GPU_MEMORY)) or device.type != "cuda":
        return
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise UsageError(
            f"{contract.GPU_MEMORY}={text!r} must be a number of GB; set machine.gpu_memory_gb in the spec"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, float(text) * 2**30 / total), device)


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread.

    Every thread starts with GPU 0: without this the first CUDA call of a rank's background thread opens a context of
    some hundred MB on rank 0's GPU.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def run_once_per_node(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on the first process of each node, and return its result on all processes of that node.

    A TrainError or OSError on any node is raised on every rank alike, so that no rank waits for one that has exited.
    """
    return _results_by_rank(ranks, ranks.local_rank == 0, work)[ranks.node_rank]


def run_on_rank_0(ranks: Ranks, work: Callable[[], T]) -> T:
    """Run `work` on rank 0, and return its result on all ranks. Errors as in `run_once_per_node`."""
    return _results_by_rank(ranks, ranks.rank == 0, work)[0]


def run_on_all(ranks: Ranks, work: Callable[[], T]) -> list[T]:
    """Run `work` on each rank, and return all results on all ranks. Errors as in `run_once_per_node`."""
    return _results_by_rank(ranks, True, work)


def _results_by_rank(ranks: Ranks, mine: bool, work: Callable[[], T]) -> list[T]:
    """Return the results by rank; those of ranks without `mine` mean nothing."""
    result: T | None = None
    error: TrainError | None = None
    if mine:
        try:
            result = work()
        except TrainError as caught:
            error = caught
        except OSError as caught:
            error = TrainError(str(caught))
    barrier(ranks)
    results = gather(ranks, (result, error))
    for _, theirs in results:
        if theirs is not None:
            raise theirs
    return [value for value, _ in results]  # type: ignore[misc]  # ranks with work have set theirs, or raised


def barrier(ranks: Ranks) -> None:
    """Wait for all ranks, up to BARRIER_SECONDS: a collective would time out earlier. Raises TrainError."""
    if ranks.store is None:
        return
    here = f"meeting/{next(ranks.barriers)}"
    ranks.store.set(f"{here}/{ranks.rank}", "")
    wait_for_keys(ranks.store, [f"{here}/{rank}" for rank in range(ranks.world)])


def wait_for_keys(store: Store, keys: list[str], late: Callable[[], None] = lambda: None) -> None:
    """Wait until all keys are set, up to BARRIER_SECONDS. `late` is called once, after LATE_SECONDS. Raises
    TrainError."""
    began, reported, pause = time.monotonic(), False, FIRST_POLL_SECONDS
    while not store.check(keys):  # not wait(), which blocks signal handlers
        waited = time.monotonic() - began
        if waited > BARRIER_SECONDS:
            raise TrainError(f"not all ranks arrived within {BARRIER_SECONDS / 3600:g} hours")
        if waited > LATE_SECONDS and not reported:
            reported = True
            late()
        time.sleep(pause)
        pause = min(2 * pause, POLL_SECONDS)


def should_report(ranks: Ranks | None, error: BaseException) -> bool:
    """Return whether this rank prints its error.

    A TrainError is printed by rank 0 and, where rank 0 has none, by the first other rank; the same text only once. A
    RuntimeError of torch is not printed once another rank has reported why it exits: it only means that a peer exited.
    `ranks` is None before `join`: then the error is this process's own.
    """
    if ranks is None or ranks.store is None:
        return True
    ours, first = isinstance(error, TrainError), ranks.rank == 0
    with suppress(RuntimeError):  # the store has exited with rank 0
        if isinstance(error, RuntimeError) or (ours and not first):
            deadline = time.monotonic() + REPORT_SECONDS
            while not ranks.store.check([_REPORTED]) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 5)
        same = ranks.store.add(f"{_REPORTED}/{error}", 1) > 1
        alone = ranks.store.add(_REPORTED, 1) == 1
        return (alone or first) and not same if ours else alone or not (same or isinstance(error, RuntimeError))
    return first


_REPORTED = "reported"


def gather(ranks: Ranks, value: T) -> list[T]:
    """Return every rank's `value`, in rank order. `value` must be picklable."""
    if ranks.world == 1:
        return [value]
    values: list[T] = [value] * ranks.world
    dist.all_gather_object(values, value)
    return values


def gather_tensors(ranks: Ranks, values: torch.Tensor) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order. All have one shape."""
    if ranks.world == 1:
        return [values]
    everybody = [torch.empty_like(values) for _ in range(ranks.world)]
    dist.all_gather(everybody, values)
    return everybody


def mean(ranks: Ranks, values: torch.Tensor) -> torch.Tensor:
    """Average over all ranks, element by element, in place."""
    if ranks.world > 1:
        dist.all_reduce(values)
        values /= ranks.world
    return values


def broadcast_buffers(ranks: Ranks, model: torch.nn.Module) -> None:
    """Broadcast rank 0's buffers, as DDP does before each forward pass in training: afterwards batch norm's running
    averages differ by rank. Repeating it changes no bit."""
    if ranks.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


def finish(ranks: Ranks) -> NoReturn:
    """Exit after success. gloo with DDP may abort in a clean interpreter exit, so wait for all ranks, destroy the group
    and skip that exit.

    After an error the group must not be destroyed, as that can deadlock; use `exit_process`.
    """
    if dist.is_initialized():
        dist.barrier(device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
        dist.destroy_process_group()
    exit_process(Exit.OK)
