"""The run of a custom script: what `launch_train.init` returns. torch is imported by `init`."""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from launch_train import checkpoint, metrics
from launch_train.common import contract
from launch_train.common.console import say
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.process_exit import exit_process

if TYPE_CHECKING:
    import torch

    from launch_train.distributed.process_group import Ranks

_RENDEZVOUS = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets beside RANK."""

LARGEST_SEED = 2**32 - 1
"""NumPy's."""


@dataclass(frozen=True)
class ScriptRun:
    """The place of this process in its run, and the state that its checkpoints hold.

    `device`: its GPU, or the CPU. `rank`, `world_size` and `local_rank`: 0, 1 and 0 without torchrun. `folder`: the run
    folder (gs://… or a local folder), None without one.
    """

    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    seed: int
    folder: str | None
    state: dict[str, Any] = field(default_factory=dict)
    """What a checkpoint holds, the same on all ranks (see `launch_train.checkpoint.restore`)."""
    own: dict[str, Any] = field(default_factory=dict)
    """What it holds of this rank alone."""

    def steps(
        self,
        total: int,
        *,
        minutes: float | Literal["auto", "off"] = "auto",
        keep_last: int = 3,
        keep_every: int = 0,
    ) -> Iterator[int]:
        """Restore `state`, and yield the steps that are left, up to `total`.

        After each step it saves a checkpoint if one is due, and leaves (exit code 75) if the machine is preempted.
        After the last step it saves and waits. A loop that is left by `break` isn't saved. `minutes`, `keep_last` and
        `keep_every` are those of `launch_train.checkpoint.restore`.

        All ranks create the same model, as they have one seed. From here on each rank draws its own random numbers.
        """
        if self.world_size > 1:
            _seed(self.seed + self.rank)
        first = checkpoint.restore(
            self.state, own=self.own, minutes=minutes, keep_last=keep_last, keep_every=keep_every
        )
        if self.rank == 0:
            metrics.event("start", steps=total)  # for the remaining time in `launch watch`
        for step in range(first + 1, total + 1):
            yield step
            if checkpoint.due(step):
                checkpoint.save(step, self.state, own=self.own)
            if checkpoint.preempted():
                checkpoint.leave()
        if first < total:
            checkpoint.save(total, self.state, own=self.own, wait=True)

    def log(self, step: int, **values: Any) -> None:
        """Log one row of metrics, as `launch_train.metrics.log` does: from rank 0."""
        metrics.log(step, **values)


def init(seed: int) -> ScriptRun:
    """See `launch_train.init`."""
    env = os.environ
    rank = int(env.get("RANK") or 0)
    try:
        if type(seed) is not int or not 0 <= seed <= LARGEST_SEED - rank:
            raise UsageError(f"launch_train.init: seed={seed!r} must be a whole number from 0 to 2**32 - 1")
        if "RANK" in env and (missing := [name for name in _RENDEZVOUS if not env.get(name)]):
            raise UsageError(
                f"RANK is set, but not {', '.join(missing)}: start the script with torchrun "
                "(torchrun --nproc-per-node=2 SCRIPT), or unset RANK"
            )
        ranks = _join(env)
    except TrainError as error:
        if rank == 0 or not isinstance(error, UsageError):  # a UsageError is the same on all ranks
            say(str(error))
        exit_process(int(error.exit), rank=rank)
    _seed(seed)
    return ScriptRun(ranks.device, ranks.rank, ranks.world, ranks.local_rank, seed, env.get(contract.RUN_FOLDER))


def _join(env: Mapping[str, str]) -> Ranks:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise UsageError(
            f"launch_train.init needs torch, which can't be imported ({error}); a script without torch can use "
            "launch_train.metrics alone"
        ) from error
    from launch_train.distributed import process_group

    if dist.is_initialized():
        ranks = process_group.joined(env)
        process_group.limit_memory(ranks.device, env)
        return ranks
    ranks = process_group.join(env)
    if dist.is_initialized():
        process_group.raise_timeout(process_group.SCRIPT_TIMEOUT)
        atexit.register(_leave_group)
    return ranks


def _leave_group() -> None:
    """Destroy the process group at the end of a script; after an error that can deadlock."""
    import torch.distributed as dist

    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    with suppress(ImportError):  # optional
        import numpy as np

        np.random.seed(seed)
