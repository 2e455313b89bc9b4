"""What all ranks do at the end of a step, agreed upon without waiting: stop, save, or go on.

Each rank's wishes go into an all-reduce on CPUs that is started at the end of one step and read at the end of the next,
so that no step waits for it; nothing is ever collective in a signal handler. Long steps are agreed upon at once: there
the wait is nothing, and a second step would cost much of the time that a preemption leaves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from train.dist import TIMEOUT, Ranks


class Wish(NamedTuple):
    """What one rank wants, or what was agreed: what one rank wants, all do."""

    stop: bool = False
    """Save, and leave: the machine goes."""
    save: bool = False
    leave: bool = False
    """Leave without saving: another start has taken over."""

    def __or__(self, other: Wish) -> Wish:
        return Wish(*(mine or theirs for mine, theirs in zip(self, other, strict=True)))


class Agreement:
    """The ranks' line for wishes. Every rank calls it in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if ranks.world > 1 else None
        self._group = group
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def turn(self, wish: Wish, *, at_once: bool = False) -> Wish:
        """Say what this rank wants; what all want together, as they said it at the last turn (with `at_once`, now).

        `at_once` is the same on all ranks. Raises RuntimeError if a rank has gone.
        """
        if self._group is None:
            return wish
        agreed = self._read()
        flags = torch.tensor(wish, dtype=torch.int32)
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None  # noqa: S101 - only for mypy: async_op returns one
        self._pending = (work, flags)
        return agreed | self._read() if at_once else agreed

    def close(self) -> Wish:
        """Read what is under way: nothing of it may be left when the ranks part."""
        return self._read()

    def _read(self) -> Wish:
        if self._pending is None:
            return Wish()
        (work, flags), self._pending = self._pending, None
        work.wait()
        return Wish(*(bool(flag) for flag in flags.tolist()))
