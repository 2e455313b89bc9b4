"""The protocol of a source, and the order of samples: a pure function of (seed, stream, step), blind to the ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device, the first dimension being the sample."""

TRAIN, HELD_OUT = 0, 1
"""Streams of random numbers: what one draws says nothing about the other."""

HELD_OUT_SHARE = 10
"""One part in so many is held out: the last 10 %."""


class Source(Protocol):
    """Endless training batches, and held-out ones that are the same in each evaluation."""

    unit: str
    """tokens or images: what a rate counts."""
    per_sample: int
    """Units in one sample: the block size of text, 1 for images."""
    facts: dict[str, Any]
    """What the start event says about the data."""
    unigram_entropy: float | None
    """Nats per token of the held-out part under the training part's frequencies: what a model that knows frequencies
    only would lose. None where it says nothing."""

    def train(self, step: int, share: slice) -> Batch:
        """The samples `share` of the global batch of a step (from 1)."""

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """The samples `share` of global batch `index` (from 0) out of `count` held-out batches."""


def share(batch_size: int, rank: int, world: int) -> slice:
    """A rank's part of a global batch; `batch_size` is divisible by `world`."""
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def draw(seed: int, stream: int, step: int, count: int, below: int) -> NDArray[np.int64]:
    """`count` numbers from 0 to below - 1. Philox counts: any step's numbers come without those before it."""
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array([0, 0, 0, step], np.uint64))
    return np.random.Generator(bits).integers(0, below, size=count, dtype=np.int64)
