"""Agree at the end of a step whether all ranks stop, save or continue, without waiting for each other.

The votes go into an all-reduce on the CPU that starts at the end of one step and is read at the end of a later one, so
no step waits for it. Nothing collective ever runs in a signal handler. Long steps are agreed on at once: the wait is
negligible there, and a second step would cost much of the time that a preemption leaves. Of short steps only some vote:
an all-reduce costs a millisecond of the CPU cores that gloo shares with the training.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from launch_train.common import contract
from launch_train.common.shutdown_signal import ShutdownSignal
from launch_train.distributed.process_group import TIMEOUT, Ranks, gather

LONG_SECONDS = 0.5
"""Steps longer than this are agreed on at once."""

VOTE_SECONDS = 0.2
"""Least time between two votes. A preemption is agreed on after two votes."""


class StepVote(NamedTuple):
    """One rank's vote, or the result: whatever one rank wants, all do."""

    stop: bool = False
    """Save and exit: the machine is being preempted."""
    save: bool = False
    leave: bool = False
    """Exit without saving: another start has taken over."""

    def __or__(self, other: StepVote) -> StepVote:
        return StepVote(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


def seconds_to_save(ranks: Ranks, shutdown: ShutdownSignal) -> float:
    """Return the seconds in which a checkpoint must be durable: the least that any machine of the run has left.
    Collective."""
    began = time.monotonic()
    seconds = min(gather(ranks, shutdown.save_by - began))
    if math.isinf(seconds):  # a notice that no machine could write
        seconds = contract.SAVE_SECONDS
    return seconds - (time.monotonic() - began)


class Agreement:
    """Collects the votes of all ranks. Every rank calls it in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if ranks.world > 1 else None
        self._group = group
        self._steps, self._vote = 0, StepVote()
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def vote(self, vote: StepVote, step_seconds: float) -> StepVote:
        """Vote, and return the result of the previous vote; in long steps, of this one. Votes between two all-reduces
        are combined.

        `step_seconds`: length of a step, 0 if it isn't known yet; the same on all ranks. Raises RuntimeError if a rank
        has exited.
        """
        if self._group is None:
            return vote
        self._steps, self._vote = self._steps + 1, self._vote | vote
        if step_seconds and self._steps * step_seconds < VOTE_SECONDS:
            return StepVote()
        agreed, flags = self._read(), torch.tensor(self._vote, dtype=torch.int32)
        self._steps, self._vote = 0, StepVote()
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None  # noqa: S101 - only for mypy: async_op returns one
        self._pending = (work, flags)
        return agreed | self._read() if step_seconds > LONG_SECONDS else agreed

    def close(self) -> StepVote:
        """Read the pending vote: none may be left when the ranks part."""
        return self._read()

    def _read(self) -> StepVote:
        if self._pending is None:
            return StepVote()
        (work, flags), self._pending = self._pending, None
        work.wait()
        return StepVote(*(bool(flag) for flag in flags.tolist()))
