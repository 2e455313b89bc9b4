"""The protocol of a data source."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, on the device. The first dimension is the sample."""

IGNORED = -100
"""A target that doesn't count (torch's cross-entropy has the same default), such as an unmasked token."""

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
