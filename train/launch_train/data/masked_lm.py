"""Masked language: some tokens of a text are hidden, and are what is to be found out."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data.batch import to_tensor
from launch_train.data.source import IGNORED, MASK, MASK_HELD_OUT, Batch, Source, SourceDefaults, philox

SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1
"""Of the hidden tokens, so many are replaced by the mask, and so many by a random token; the others stay (Devlin et
al. 2018, section 3.1)."""


class Rows(Source, Protocol):
    """A source of windows, one token longer than a sample."""

    mask: int
    end: int | None

    def train_rows(self, step: int, share: slice) -> NDArray[Any]: ...

    def held_out_rows(self, index: int, count: int, share: slice) -> NDArray[Any]: ...


class Rule(NamedTuple):
    """The share that is hidden, how many tokens there are, the mask, and the token that is never hidden."""

    share: float
    tokens: int
    mask: int
    never: int | None


class Masked(SourceDefaults):
    """Windows of a text with a `hidden` share of their tokens replaced. Which ones, and by what, is a pure function of
    (seed, step, sample)."""

    def __init__(self, rows: Rows, hidden: float, seed: int, batch_size: int, device: torch.device) -> None:
        if rows.vocab_size is None:
            raise UsageError("data: there are no tokens to hide")
        self._rows, self._seed, self._batch_size, self._device = rows, seed, batch_size, device
        self._rule = Rule(hidden, rows.vocab_size, rows.mask, rows.end)
        self.per_sample = self.targets = rows.per_sample
        self.vocab_size = max(rows.vocab_size, rows.mask + 1)
        self.facts = {**rows.facts, "masked": hidden}

    def train(self, step: int, share: slice) -> Batch:
        return self._batch(self._rows.train_rows(step, share), MASK, step, share)

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._batch(self._rows.held_out_rows(index, count, share), MASK_HELD_OUT, index, share)

    def drawn(self, step: int) -> list[int]:
        return self._rows.drawn(step)

    def _batch(self, rows: NDArray[Any], stream: int, step: int, share: slice) -> Batch:
        tokens = rows[:, : self.per_sample].astype(np.int64)
        first = share.indices(self._batch_size)[0]
        random = bits(self._seed, stream, step, first, *tokens.shape)
        inputs, targets = hide(tokens, random, self._rule)
        return to_tensor(inputs, self._device), to_tensor(targets, self._device)


def bits(seed: int, stream: int, step: int, first: int, samples: int, length: int) -> NDArray[np.uint64]:
    """64 random bits for each token of the samples `first` and following of a step: a sample's are the same whoever
    asks for it. Philox makes four numbers at a time."""
    blocks = -(-length // 4)
    raw = philox(seed, stream, [first * blocks, 0, 0, step]).random_raw(samples * blocks * 4)
    return raw.reshape(samples, blocks * 4)[:, :length]


def hide(
    tokens: NDArray[np.int64], random: NDArray[np.uint64], rule: Rule
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets. The highest 24 bits decide what is hidden, the next 16 how, the lowest 24 which token is
    shown instead. At least one token of a sample is hidden: a loss over none would be no number."""
    lot = (random >> np.uint64(40)).astype(np.int64)
    if rule.never is not None:
        lot[tokens == rule.never] = 1 << 24
    hidden = lot < rule.share * 2**24
    np.put_along_axis(hidden, lot.argmin(axis=1)[:, None], True, axis=1)
    how = ((random >> np.uint64(24)) & np.uint64(0xFFFF)).astype(np.int64) / 2**16
    other = ((random & np.uint64(0xFFFFFF)).astype(np.int64) * rule.tokens) >> 24
    inputs = np.where(hidden & (how < SHOWN_AS_MASK), rule.mask, tokens)
    swapped = hidden & (how >= SHOWN_AS_MASK) & (how < SHOWN_AS_MASK + SHOWN_AS_ANOTHER)
    return np.where(swapped, other, inputs), np.where(hidden, tokens, IGNORED)
