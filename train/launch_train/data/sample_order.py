"""The samples of each step: a pure function of (seed, stream, step), the same for any number of ranks.

A resumed run needs no stored position: the samples of its next step follow from the seed and the step's number.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

TRAIN, HELD_OUT = 0, 1
"""Independent streams of random numbers. launch_train.trainer.build uses 2 and 3."""
ORDER, AUGMENT, MASK, MASK_HELD_OUT, USER_DATASET, HELD_OUT_PART = 4, 5, 6, 7, 8, 9
"""Order of an epoch, image augmentation, masked tokens (training, held-out), a custom dataset's random numbers, and the
held-out part."""


def samples_of_step(seed: int, step: int, batch_size: int, count: int) -> list[tuple[int, int]]:
    """Return index and epoch of each sample in the global batch of a step (from 1), of a dataset of `count` samples.

    Sample k of a run (from 0) is number k mod count in the order of epoch k div count.
    """
    first = (step - 1) * batch_size
    numbers = (divmod(k, count) for k in range(first, first + batch_size))
    return [(int(order(seed, ORDER, epoch, count)[at]), epoch) for epoch, at in numbers]


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
