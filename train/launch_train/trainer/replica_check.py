"""Compare the ranks' parameters and moments every few steps, before each checkpoint, and at the end.

DDP gives all ranks the same gradients. Ranks that diverge (a flipped bit, a GPU that computes wrongly) never converge
again, and no loss or gradient norm shows it: those are means. What the ranks compare is a digest, computed on their
devices; the host reads it one block of rows later, when it waits for the device anyway.

A checkpoint is written only if the ranks agree on its state, so the newest checkpoint is always good.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from launch_train.common.decisions import Choice
from launch_train.common.step_timer import open_stopwatch
from launch_train.distributed.dtensor import is_sharded, local_part
from launch_train.distributed.process_group import Ranks, gather, gather_tensors
from launch_train.performance import fsdp

MAX_SHARE = 0.001
"""The share of the training time that comparisons may take, not counting those before checkpoints."""


class ReplicaDifference(NamedTuple):
    """The ranks agreed after step `agreed`, but not after step `step`. `ranks` are those that differ from the majority,
    or all ranks if no value has one. `what` differs: parameters, moments, or both."""

    agreed: int
    step: int
    ranks: tuple[int, ...]
    what: str

    def describe(self, world: int) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        how = "differ" if len(self.ranks) == world else f"differ from those of the other ranks (of {world})"
        when = f"the ranks agreed after step {self.agreed}, but not after step {self.step}"
        return f"the {self.what} of {who} {how}: {when}"


def find_difference(digests: Sequence[Sequence[int]], agreed: int, step: int) -> ReplicaDifference | None:
    """Return how the digests (parameters, moments) of the ranks differ; None if they are equal."""
    values = [tuple(digest) for digest in digests]
    (common, count), *others = Counter(values).most_common()
    if not others:
        return None
    majority = count > len(values) / 2
    ranks = tuple(rank for rank, value in enumerate(values) if not majority or value != common)
    columns = zip(("parameters", "moments"), zip(*values, strict=True), strict=True)
    what = " and ".join(name for name, column in columns if len(set(column)) > 1)
    return ReplicaDifference(agreed, step, ranks, what)


class ReplicaCheck:
    """The comparisons of one process. All ranks call each method at the same step."""

    def __init__(self, ranks: Ranks, *, sharded: bool) -> None:
        """`sharded`: with FSDP each parameter is on one rank only, so there is nothing to compare."""
        self._ranks, self._stopwatch = ranks, open_stopwatch(ranks.device)
        self.compares = ranks.world > 1 and not sharded
        self.last_agreed = 0
        """The last step after which all ranks were found to agree; at the start, the one that the run resumes from."""
        self.interval = 1
        """Steps between comparisons, from the cost of the last one."""
        self._last_compared = 0
        self._host_seconds = 0.0
        self._pending: tuple[int, list[Tensor]] | None = None

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the note for the start if several ranks compare nothing."""
        off = self._ranks.world > 1 and not self.compares
        return (Choice("replicas", "not compared", "with FSDP each parameter is on one rank only"),) if off else ()

    def start(self, step: int) -> None:
        """Start, or resume, after this step, at which all ranks have the same state."""
        self.last_agreed = self._last_compared = step

    def due(self, step: int) -> bool:
        return self.compares and step - self._last_compared >= self.interval

    def compare(self, step: int, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Compute and gather the digests of this step's state without waiting for the device; `read` returns the
        result."""
        if not self.compares:
            return
        started, device = time.perf_counter(), self._ranks.device
        self._stopwatch.start()
        own = torch.stack([digest(tensors, device) for tensors in replicated_tensors(parameters, optimizer, device)])
        self._pending, self._last_compared = (step, gather_tensors(self._ranks, own)), step
        self._stopwatch.stop()
        self._host_seconds = time.perf_counter() - started

    def read(self, step_seconds: float) -> ReplicaDifference | None:
        """Return the difference that the last comparison found, once; None if the ranks agree.

        `step_seconds`: the usual duration of a step, the same on all ranks; sets the interval.
        """
        if self._pending is None:
            return None
        (step, gathered), self._pending = self._pending, None
        if difference := find_difference(torch.stack(gathered).tolist(), self.last_agreed, step):
            return difference
        self.last_agreed = step
        ((device_seconds, *_),) = self._stopwatch.read()
        own_cost = torch.tensor([max(device_seconds, self._host_seconds)], device=self._ranks.device)
        cost = max(seconds.item() for seconds in gather_tensors(self._ranks, own_cost))
        self.interval = max(1, ceil(cost / (MAX_SHARE * step_seconds))) if step_seconds else 1
        return None


def replicated_tensors(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Return all parameters, and the optimizer's tensors for them on the device, in the same order on every rank."""
    listed = list(parameters)
    states = [state for parameter in listed if (state := optimizer.state.get(parameter))]
    values = [state[name] for state in states for name in sorted(state)]
    return listed, [value for value in values if isinstance(value, Tensor) and value.device.type == device.type]


def digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one number [] (int64) for the bits of all tensors, on their device. One flipped bit always changes it.
    Within a tensor the order of the elements doesn't matter: their bits are added as integers, in one pass."""
    if not tensors:
        return torch.zeros((), dtype=torch.int64, device=device)
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        integers = _INTEGERS[real.element_size()]
        sums.append(real.view(integers).sum(dtype=integers).long())
    weights = 2 * torch.arange(len(sums), device=device) + 1
    return (torch.stack(sums) * weights).sum()


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by element size, so that nothing is copied; sums wrap around."""


# --- At the end -------------------------------------------------------------------------------------------------------


def parameters_sha256(model: nn.Module, ranks: Ranks) -> str:
    """Return the SHA-256 over name, type, shape and bytes of each parameter and buffer (batch norm's running averages).

    Collective if the model is sharded: each rank hashes its shards, and their digests are hashed in the ranks' order.
    The result then depends on the number of ranks, but no rank gathers the model.
    """
    fsdp.reshard(model)
    digest, shards = hashlib.sha256(), hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = local_part(tensor.detach()).cpu().contiguous()
        part = shards if is_sharded(tensor) else digest
        part.update(f"{name} {values.dtype} {tuple(tensor.shape)}\n".encode())
        part.update(values.flatten().view(torch.uint8).numpy().tobytes())
    if fsdp.has_shards(model):
        digest.update(" ".join(gather(ranks, shards.hexdigest())).encode())
    return digest.hexdigest()


def find_disagreement(digests: Sequence[str]) -> str | None:
    """Return an error message that names the ranks of each digest, or None if all are equal."""
    if len(set(digests)) == 1:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    listed = "; ".join(f"ranks {', '.join(map(str, members))}: {digest[:16]}…" for digest, members in ranks.items())
    return f"the ranks' parameters differ at the end, so the result must not be trusted ({listed})"
