"""The protocol of a data source, and the order of samples: a pure function of (seed, stream, step)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device. The first dimension is the sample."""

IGNORED = -100
"""A target that doesn't count (torch's cross-entropy has the same default), such as an unmasked token."""

TRAIN, HELD_OUT = 0, 1
"""Independent streams of random numbers. launch_train.trainer.build uses 2 and 3."""
ORDER, AUGMENT, MASK, MASK_HELD_OUT, USER_DATASET, HELD_OUT_PART = 4, 5, 6, 7, 8, 9
"""Order of an epoch, image augmentation, masked tokens (training, held-out), a custom dataset's random numbers, and the
held-out part."""

HELD_OUT_SHARE = 10
"""One part in this many is held out: the last 10 %."""


class Source(Protocol):
    """Endless training batches, and held-out ones that are the same in each evaluation."""

    unit: str
    """tokens, images or samples: the unit of the reported speed."""
    per_sample: int
    """Units in one sample: the block size of text, 1 for images."""
    targets: int
    """Targets of one sample, if some of them may be IGNORED; 0: all of them count."""
    facts: dict[str, Any]
    """Fields for the start event."""
    unigram_entropy: float | None
    """The unigram baseline: nats per held-out token under the training part's frequencies. None: not meaningful."""
    vocab_size: int | None
    """Number of tokens, including a mask token; None: no tokens."""
    num_classes: int | None
    """Number of image classes, if known."""
    image_size: int | None
    """Height and width of images, if known."""
    class_names: tuple[str, ...]
    """Names of the image classes by their number; empty if they have none."""
    slow: bool
    """True if batches are expensive to prepare, so that worker processes prepare them."""
    holds_out: bool
    """True if there is held-out data."""

    def train(self, step: int, share: slice) -> Batch:
        """Return the samples `share` of the global batch of a step (from 1). They may still be on the CPU."""

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """Return the samples `share` of global batch `index` (from 0) of `count` held-out batches, as `train`."""

    def finish(self, batch: Batch) -> Batch:
        """Do the remaining work on a batch that is on the device."""

    def drawn(self, step: int) -> list[int]:
        """Return the samples of a step's global batch: offsets into a text, or indices into a dataset."""


class SourceDefaults:
    """Defaults that most sources share."""

    unit = "tokens"
    per_sample = 1
    targets = 0
    unigram_entropy: float | None = None
    vocab_size: int | None = None
    num_classes: int | None = None
    image_size: int | None = None
    class_names: tuple[str, ...] = ()
    slow = False
    holds_out = True

    def finish(self, batch: Batch) -> Batch:
        return batch


def share(batch_size: int, rank: int, world: int) -> slice:
    """Return a rank's part of a global batch. `batch_size` must be divisible by `world`."""
    size = batch_size // world
    return slice(rank * size, (rank + 1) * size)


def draw(seed: int, stream: int, step: int, count: int, below: int) -> NDArray[np.int64]:
    """Draw `count` integers from 0 to below - 1. Philox is counter-based: no need to draw the steps before."""
    return generator(seed, stream, 0, step).integers(0, below, size=count, dtype=np.int64)


def generator(seed: int, stream: int, index: int, step: int) -> np.random.Generator:
    """Return the random generator for one sample (`index`) of a step or epoch."""
    return np.random.Generator(philox(seed, stream, [0, 0, index, step]))


def philox(seed: int, stream: int, counter: list[int]) -> np.random.Philox:
    """Return a random stream that starts at `counter`, whose first word counts blocks of four 64-bit numbers."""
    return np.random.Philox(key=np.array([seed, stream], np.uint64), counter=np.array(counter, np.uint64))


@lru_cache(maxsize=4)
def order(seed: int, stream: int, epoch: int, count: int) -> NDArray[np.int64]:
    """Return a permutation of 0 to count - 1 for an epoch (from 0). Cached: it is needed for each sample."""
    return generator(seed, stream, 0, epoch).permutation(count)
