"""Masked language modelling: some tokens of a text are hidden, and the model predicts them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from launch_train.common.errors import UsageError
from launch_train.data.batch import to_tensor
from launch_train.data.sample_order import MASK, MASK_HELD_OUT, philox
from launch_train.data.source import IGNORED, Batch, Source, TokenRows

SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1
"""Shares of the hidden tokens that are replaced by the mask and by a random token; the rest is left unchanged (Devlin
et al. 2018, section 3.1)."""


class MaskingRule(NamedTuple):
    """The share of hidden tokens, the vocabulary size, the mask token, and a token that is never hidden."""

    share: float
    tokens: int
    mask: int
    never: int | None


class Masked(Source):
    """Rows of a text in which the share `hidden` of the tokens is hidden.

    The hidden tokens and their replacements are a pure function of (seed, step, sample).
    """

    def __init__(self, rows: TokenRows, hidden: float, seed: int, batch_size: int, device: torch.device) -> None:
        if rows.vocab_size is None:
            raise UsageError("data: there are no tokens to hide")
        self._rows, self._seed, self._batch_size, self._device = rows, seed, batch_size, device
        self._rule = MaskingRule(hidden, rows.vocab_size, rows.mask, rows.end)
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
    """Return 64 random bits per token of `samples` samples, from index `first` on, as uint64 [samples, length].

    The bits of a sample don't depend on the rank that draws them.
    """
    # Philox generates blocks of four numbers; each sample starts a new block.
    blocks = -(-length // 4)
    raw = philox(seed, stream, [first * blocks, 0, 0, step]).random_raw(samples * blocks * 4)
    return raw.reshape(samples, blocks * 4)[:, :length]


def hide(
    tokens: NDArray[np.int64], random: NDArray[np.uint64], rule: MaskingRule
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return inputs and targets; targets that are not hidden are IGNORED.

    The highest 24 random bits decide whether a token is hidden, the next 16 how, and the lowest 24 choose the random
    replacement. At least one token of each sample is hidden, because the mean loss of none is undefined.
    """
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
