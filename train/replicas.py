"""Whether the ranks still have the same parameters and moments: compared every few steps, and before each checkpoint.

DDP gives all ranks the same gradients. Ranks that have come apart (a flipped bit, a GPU that computes wrongly) stay
apart, and no loss or gradient norm shows it: those are means. What the ranks compare is a digest, computed on their
devices; the host reads it one block of rows later, when it waits for the device anyway.

A checkpoint is written only if the ranks agree on its state. So the newest one is good, whenever a difference is found.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from train.choice import Choice
from train.dist import Ranks, gather_tensors
from train.timing import stopwatch

SHARE = 0.001
"""The part of the training time that comparing may take, the checkpoints' comparisons aside."""


class Difference(NamedTuple):
    """The ranks agreed after step `agreed` and no longer after step `step`. `ranks` are those that differ from most, or
    all of them where no value has a majority. `what` differs: parameters, moments, or both."""

    agreed: int
    step: int
    ranks: tuple[int, ...]
    what: str

    def words(self, world: int) -> str:
        """What differs, where and when."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        how = "are not the same" if len(self.ranks) == world else f"are not those of the other ranks (of {world})"
        return f"the {self.what} of {who} {how}: the ranks agreed after step {self.agreed}, and not after {self.step}"


def difference(digests: Sequence[Sequence[int]], agreed: int, step: int) -> Difference | None:
    """`digests`: of each rank, that of its parameters and that of its moments. None: they are the same."""
    values = [tuple(one) for one in digests]
    (common, count), *others = Counter(values).most_common()
    if not others:
        return None
    majority = count > len(values) / 2
    ranks = tuple(rank for rank, value in enumerate(values) if not majority or value != common)
    columns = zip(("parameters", "moments"), zip(*values, strict=True), strict=True)
    what = " and ".join(name for name, column in columns if len(set(column)) > 1)
    return Difference(agreed, step, ranks, what)


class Replicas:
    """The comparisons of one process. All ranks call each method at the same step."""

    def __init__(self, ranks: Ranks, *, shared_out: bool) -> None:
        """`shared_out`: with FSDP each parameter is on one rank only, so that there is nothing to compare."""
        self._ranks, self._watch = ranks, stopwatch(ranks.device)
        self.compares = ranks.world > 1 and not shared_out
        self.agreed = 0
        """The last step after which all ranks were found to agree; at the start, the one that the run resumes from."""
        self.interval = 1
        """Steps from one comparison to the next, by what the last one cost."""
        self._last = 0
        self._seconds = 0.0
        self._pending: tuple[int, list[Tensor]] | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What to print at the start: that several ranks compare nothing."""
        off = self._ranks.world > 1 and not self.compares
        return (Choice("replicas", "not compared", "with fsdp each parameter is on one rank only"),) if off else ()

    def start(self, step: int) -> None:
        """The run begins, or resumes, behind this step: all ranks have the same state."""
        self.agreed = self._last = step

    def due(self, step: int) -> bool:
        """Whether it is time to compare again."""
        return self.compares and step - self._last >= self.interval

    def compare(self, step: int, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Compute the digests of this step's state and gather them, without waiting for the device; `read` has the
        result."""
        if not self.compares:
            return
        began, device = time.perf_counter(), self._ranks.device
        self._watch.start()
        own = torch.stack([digest(kept, device) for kept in replicated(parameters, optimizer, device)])
        self._pending, self._last = (step, gather_tensors(self._ranks, own)), step
        self._watch.stop()
        self._seconds = time.perf_counter() - began

    def read(self, usual: float) -> Difference | None:
        """The result of the last comparison, if it has not been read yet. None: the ranks agree. `usual`: seconds of a
        step, the same on all ranks."""
        if self._pending is None:
            return None
        (step, gathered), self._pending = self._pending, None
        if found := difference(torch.stack(gathered).tolist(), self.agreed, step):
            return found
        self.agreed = step
        ((device, _),) = self._watch.read()
        cost = torch.tensor([max(device, self._seconds)], device=self._ranks.device)
        most = max(one.item() for one in gather_tensors(self._ranks, cost))
        self.interval = max(1, ceil(most / (SHARE * usual))) if usual else 1
        return None


def replicated(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """All parameters, and what the optimizer keeps for each on the device: in the same order on every rank."""
    listed = list(parameters)
    kept = [state[name] for one in listed if (state := optimizer.state.get(one)) for name in sorted(state)]
    return listed, [one for one in kept if isinstance(one, Tensor) and one.device.type == device.type]


def digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number [] (int64) for the bits of all tensors, on the device that they are on. One flipped bit always changes
    it. Within a tensor the order of the elements doesn't count: bits are added as integers, in one pass over them."""
    if not tensors:
        return torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.stack([_bits(one).sum(dtype=_INTEGERS[one.element_size()]).long() for one in map(_real, tensors)])
    return (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of the same size, so that nothing is copied; sums wrap around."""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
