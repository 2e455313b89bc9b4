"""What a data source provides: endless training batches, and held-out ones that are the same in each evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from numpy.typing import NDArray

from launch_train.data.batch import to_tensor

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device. The first dimension is the sample."""

IGNORED = -100
"""A target that doesn't count (torch's cross-entropy has the same default), such as an unmasked token."""

HELD_OUT_SHARE = 10
"""One part in this many is held out: the last 10 %."""


class Source(ABC):
    unit = "tokens"
    """tokens, images or samples: the unit of the reported speed."""
    per_sample = 1
    """Units in one sample: the block size of text, 1 for images."""
    targets = 0
    """Targets of one sample, if some of them may be IGNORED; 0: all of them count."""
    facts: dict[str, Any]
    """Fields for the start event."""
    unigram_entropy: float | None = None
    """The unigram baseline: nats per held-out token under the training part's frequencies. None: not meaningful."""
    vocab_size: int | None = None
    """Number of tokens, including a mask token; None: no tokens."""
    num_classes: int | None = None
    """Number of image classes, if known."""
    image_size: int | None = None
    """Height and width of images, if known."""
    class_names: tuple[str, ...] = ()
    """Names of the image classes by their number; empty if they have none."""
    slow = False
    """True if batches are expensive to prepare, so that worker processes prepare them."""
    holds_out = True
    """True if there is held-out data."""

    @abstractmethod
    def train(self, step: int, share: slice) -> Batch:
        """Return the samples `share` of the global batch of a step (from 1). They may still be on the CPU."""

    @abstractmethod
    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """Return the samples `share` of global batch `index` (from 0) of `count` held-out batches, as `train`."""

    @abstractmethod
    def drawn(self, step: int) -> list[int]:
        """Return the samples of a step's global batch: offsets into a text, indices into a dataset, or the random
        numbers that they are generated from."""

    def finish(self, batch: Batch) -> Batch:
        """Do the remaining work on a batch that is on the device."""
        return batch


class TokenRows(Source):
    """A source of token rows, each one token longer than a sample: targets are the inputs shifted by one."""

    mask: int
    """The mask token. It may be the first one beyond the vocabulary."""
    end: int | None = None
    """The token after each document."""
    device: torch.device

    @abstractmethod
    def train_rows(self, step: int, share: slice) -> NDArray[Any]:
        """Return rows of per_sample + 1 tokens."""

    @abstractmethod
    def held_out_rows(self, index: int, count: int, share: slice) -> NDArray[Any]: ...

    def train(self, step: int, share: slice) -> Batch:
        return self._shifted(self.train_rows(step, share))

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._shifted(self.held_out_rows(index, count, share))

    def _shifted(self, rows: NDArray[Any]) -> Batch:
        """Copy rows to the device in their compact type (1, 2 or 4 bytes per token), and convert to int64 there."""
        tokens = to_tensor(rows, self.device).long()
        return tokens[:, :-1], tokens[:, 1:]
