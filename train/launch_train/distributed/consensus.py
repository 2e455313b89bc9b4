"""What all ranks do at the end of a step, agreed upon without waiting: stop, save, or go on.

Each rank's wishes go into an all-reduce on CPUs that is started at the end of one step and read at the end of a later
one, so that no step waits for it; nothing is ever collective in a signal handler. Long steps are agreed upon at once:
there the wait is nothing, and a second step would cost much of the time that a preemption leaves. Of short steps only
some have a word about it: it costs a millisecond of the processors that gloo shares with the training.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from launch_train.distributed.process_group import TIMEOUT, Ranks

LONG_SECONDS = 0.5
"""Steps that take longer are agreed upon at once."""

APART_SECONDS = 0.2
"""Steps between two turns take about so long. A preemption is heeded after two turns: it leaves 14 s and more."""


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
        self._since, self._wished = 0, Wish()
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def turn(self, wish: Wish, usual: float) -> Wish:
        """Say what this rank wants; what all want together, as they said it at the last turn (in long steps, now).
        What was wished between two turns is said at the next.

        `usual`: seconds of a step, 0 if that isn't known yet; the same on all ranks. Raises RuntimeError if a rank has
        gone.
        """
        if self._group is None:
            return wish
        self._since, self._wished = self._since + 1, self._wished | wish
        if usual and self._since * usual < APART_SECONDS:
            return Wish()
        agreed, flags = self._read(), torch.tensor(self._wished, dtype=torch.int32)
        self._since, self._wished = 0, Wish()
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, self._group, async_op=True)
        assert work is not None  # noqa: S101 - only for mypy: async_op returns one
        self._pending = (work, flags)
        return agreed | self._read() if usual > LONG_SECONDS else agreed

    def close(self) -> Wish:
        """Read what is under way: nothing of it may be left when the ranks part."""
        return self._read()

    def _read(self) -> Wish:
        if self._pending is None:
            return Wish()
        (work, flags), self._pending = self._pending, None
        work.wait()
        return Wish(*(bool(flag) for flag in flags.tolist()))
