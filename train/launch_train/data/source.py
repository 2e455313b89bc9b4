"""The protocol of a source, and the order of samples: a pure function of (seed, stream, step), blind to the ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device, the first dimension being the sample."""

IGNORED = -100
"""A target that counts for nothing, as torch's cross-entropy has it: a token that was not hidden."""

TRAIN, HELD_OUT = 0, 1
"""Streams of random numbers: what one draws says nothing about the other. launch_train.trainer.build has 2 and 3."""
ORDER, CHANGE, MASK, MASK_HELD_OUT, OWN, PART = 4, 5, 6, 7, 8, 9
"""The order of an epoch, how an image is changed, which tokens are hidden, what a user's dataset draws, and which part
is held out."""

HELD_OUT_SHARE = 10
"""One part in so many is held out: the last 10 %."""


class Source(Protocol):
    """Endless training batches, and held-out ones that are the same in each evaluation."""

    unit: str
    """tokens, images or samples: what a rate counts."""
    per_sample: int
    """Units in one sample: the block size of text, 1 for images."""
    targets: int
    """Targets of one sample, if some of them may be IGNORED; 0: all of them count."""
    facts: dict[str, Any]
    """What the start event says about the data."""
    unigram_entropy: float | None
    """Nats per token of the held-out part under the training part's frequencies: what a model that knows frequencies
    only would lose. None where it says nothing."""
    vocab_size: int | None
    """How many tokens there are, a mask included; None where there are none."""
    num_classes: int | None
    """Of images, where it is known."""
    image_size: int | None
    """Height and width of images, where they are known."""
    slow: bool
    """Whether making a batch takes long: then processes of their own make it, on the CPU."""
    holds_out: bool
    """Whether there is held-out data."""

    def train(self, step: int, share: slice) -> Batch:
        """The samples `share` of the global batch of a step (from 1), perhaps still on the CPU."""

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """The samples `share` of global batch `index` (from 0) out of `count` held-out batches, as in `train`."""

    def finish(self, batch: Batch) -> Batch:
        """What is left to do with a batch once it is on the device."""

    def drawn(self, step: int) -> list[int]:
        """Which samples the global batch of a step has: offsets into a text, places in a dataset."""


class Usual:
    """What most sources have in common."""

    unit = "tokens"
    per_sample = 1
    targets = 0
    unigram_entropy: float | None = None
    vocab_size: int | None = None
    num_classes: int | None = None
    image_size: int | None = None
    slow = False
    holds_out = True

    def finish(self, batch: Batch) -> Batch:
        return batch


def share(batch_size: int, rank: int, world: int) -> slice:
    """A rank's part of a global batch; `batch_size` is divisible by `world`."""
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def draw(seed: int, stream: int, step: int, count: int, below: int) -> NDArray[np.int64]:
    """`count` numbers from 0 to below - 1. Philox counts: any step's numbers come without those before it."""
    return generator(seed, stream, 0, step).integers(0, below, size=count, dtype=np.int64)


def generator(seed: int, stream: int, index: int, step: int) -> np.random.Generator:
    """Random numbers of one sample (`index`) of a step or an epoch."""
    return np.random.Generator(philox(seed, stream, [0, 0, index, step]))


def philox(seed: int, stream: int, counter: list[int]) -> np.random.Philox:
    """A stream from one of its places on: the first word of `counter` counts four numbers of 64 bits each."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array(counter, np.uint64))


@lru_cache(maxsize=4)
def order(seed: int, stream: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The places 0 to count - 1 in the order of an epoch (from 0). Kept: a batch asks for it sample by sample."""
    return generator(seed, stream, 0, epoch).permutation(count)
