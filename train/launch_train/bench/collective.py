"""Measure the bus bandwidth of all-reduce over all ranks, by size, and the links between a node's ranks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from launch_train.bench import clock
from launch_train.bench.figures import BenchFigure
from launch_train.common.errors import UnfitError
from launch_train.distributed.process_group import Ranks, gather

SIZES: Final = (1, 4, 16, 64, 256)
QUICK: Final = (1, 16, 64)
"""Sizes in MB (2^20 bytes). DDP's buckets have 25 MB."""


LINK: Final = "link to the next"
"""Name of the link's figure."""
LINK_MB: Final = 256
"""MB per direction on GPUs. Starting an exchange takes the host 0.2 ms, enough for NVLink to transfer 100 MB."""


def measure(ranks: Ranks, sizes: Sequence[int], budget: float) -> list[BenchFigure]:
    """Measure GB/s of all-reduce for each size, and of the link to the next rank. Empty for a single rank.

    Raises UnfitError on all ranks if one has too little memory.
    """
    if ranks.world == 1:
        return []
    linked = 2 * LINK_MB if ranks.device.type == "cuda" else 0
    buffer = _allocated(ranks, max(*sizes, linked) << 18)
    figures = []
    for size in sizes:
        part = buffer[: size << 18]
        slowest = max(gather(ranks, _seconds(ranks, partial(dist.all_reduce, part), budget)))
        figures.append(BenchFigure(name(size), bus_gbs(size << 20, slowest, ranks.world), "GB/s"))
    return [*figures, *_ring(ranks, buffer, budget)]


def name(size: int) -> str:
    """Return the figure's name. `size`: MB."""
    return f"all-reduce {size} MB"


def bus_gbs(moved: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in GB/s, which doesn't depend on the number of ranks. `moved`: bytes that were reduced.

    Each link transfers 2 (n - 1) / n of them, for reduce-scatter and all-gather:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * moved / seconds / 1e9


def _allocated(ranks: Ranks, count: int) -> torch.Tensor:
    """Allocate zeros, which stay zero in repeated sums. Raises UnfitError on all ranks if one fails."""
    problem, buffer = "", torch.empty(0)
    try:
        buffer = torch.zeros(count, device=ranks.device)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        problem = f"rank {ranks.rank}: {error}".partition("\n")[0]
    if first := next(filter(None, gather(ranks, problem)), ""):
        raise UnfitError(first)
    return buffer


def _ring(ranks: Ranks, buffer: torch.Tensor, budget: float) -> list[BenchFigure]:
    """Measure GB/s that each rank sends to the next rank of its node while it receives as much from the previous one.

    All ranks exchange at the same time, and a slow link shows at both of its ends. Empty if no node has two ranks.
    """
    firsts = gather(ranks, ranks.node_rank)
    if max(Counter(firsts).values()) == 1:
        return []
    beside = [rank for rank, first in enumerate(firsts) if first == ranks.node_rank]
    out, into = buffer.chunk(2)
    taken = _seconds(ranks, lambda: _pass_on(ranks, beside, out, into), budget)
    moved = out.numel() * out.element_size()
    return [BenchFigure(LINK, moved / taken / 1e9, "GB/s")] if len(beside) > 1 else []


def neighbours(rank: int, beside: Sequence[int]) -> tuple[int, int]:
    """Return the next and the previous rank in the ring of the node's ranks, `beside`."""
    at = beside.index(rank)
    return beside[(at + 1) % len(beside)], beside[at - 1]


def _pass_on(ranks: Ranks, beside: Sequence[int], out: torch.Tensor, into: torch.Tensor) -> None:
    if len(beside) == 1:
        return
    after, before = neighbours(ranks.rank, beside)
    both = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
    for request in dist.batch_isend_irecv(both):
        request.wait()


def _seconds(ranks: Ranks, work: clock.Work, budget: float) -> float:
    """Return this rank's median seconds. All ranks run the same number of repeats, which rank 0 decides."""
    clock.times(work, ranks.device, 2)
    each = statistics.median(clock.times(work, ranks.device, 2))
    count = gather(ranks, clock.repeats(each, budget))[0]
    return statistics.median(clock.times(work, ranks.device, count))
