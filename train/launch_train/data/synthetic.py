"""Synthetic data, generated from the seed, to try a machine without a dataset. It is learnable: the loss falls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from launch_train.data.batch import to_tensor
from launch_train.data.sample_order import HELD_OUT, TRAIN, draw
from launch_train.data.source import HELD_OUT_SHARE, Batch, Source, TokenRows


class SyntheticTokens(TokenRows):
    """Arithmetic progressions: each sample counts from a random start in steps of 1 to 4, modulo the vocabulary size.

    All tokens are equally likely. The mask is the first token beyond the vocabulary.
    """

    def __init__(self, vocab: int, block_size: int, seed: int, batch_size: int, device: torch.device) -> None:
        self._vocab, self._seed, self._batch_size, self.device = vocab, seed, batch_size, device
        self.per_sample = block_size
        self.vocab_size = self.mask = vocab
        self.facts: dict[str, Any] = {"data": "synthetic"}

    def drawn(self, step: int) -> list[int]:
        return [int(number) for number in self._numbers(TRAIN, step)[:, 0]]

    def train_rows(self, step: int, share: slice) -> NDArray[np.int64]:
        return self._rows(TRAIN, step, share)

    def held_out_rows(self, index: int, count: int, share: slice) -> NDArray[np.int64]:
        return self._rows(HELD_OUT, index, share)

    def _rows(self, stream: int, step: int, share: slice) -> NDArray[np.int64]:
        numbers = self._numbers(stream, step)[share]
        start, stride = numbers[:, :1] % self._vocab, numbers[:, 1:] % 4 + 1
        rows: NDArray[np.int64] = (start + stride * np.arange(self.per_sample + 1)) % self._vocab
        return rows

    def _numbers(self, stream: int, step: int) -> NDArray[np.int64]:
        return draw(self._seed, stream, step, 2 * self._batch_size, 4 * self._vocab).reshape(-1, 2)


class SyntheticImages(Source):
    """Noise plus a pattern per class. The noise is drawn once, so that speed measurements don't include drawing it.

    Images are float32 [batch, 3, size, size], labels int64 [batch]. The last 10 % of the noise images are held out.
    """

    unit = "images"

    def __init__(self, classes: int, size: int, seed: int, batch_size: int, device: torch.device) -> None:
        self._classes, self._size, self._seed, self._batch_size, self._device = classes, size, seed, batch_size, device
        self.image_size = size
        random = torch.Generator().manual_seed(seed)
        self._noise = torch.randn(_POOL, 3, size, size, generator=random).to(device)
        self._patterns = torch.randn(classes, 3, 4, 4, generator=random).to(device)
        self.facts: dict[str, Any] = {"data": "synthetic"}

    def train(self, step: int, share: slice) -> Batch:
        return self._samples(self._numbers(TRAIN, step, _TRAINED)[share], 0, _TRAINED)

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._samples(self._numbers(HELD_OUT, index, _POOL - _TRAINED)[share], _TRAINED, _POOL - _TRAINED)

    def drawn(self, step: int) -> list[int]:
        return [int(number) for number in self._numbers(TRAIN, step, _TRAINED)[:, 0]]

    def _numbers(self, stream: int, step: int, images: int) -> NDArray[np.int64]:
        return draw(self._seed, stream, step, 2 * self._batch_size, self._classes * images).reshape(-1, 2)

    def _samples(self, numbers: NDArray[np.int64], first: int, images: int) -> Batch:
        drawn = to_tensor(numbers, self._device)
        noise, labels = first + drawn[:, 0] % images, drawn[:, 1] % self._classes
        pattern = functional.interpolate(self._patterns[labels], size=(self._size, self._size), mode="nearest")
        return self._noise[noise] + pattern, labels


_POOL = 100
"""Number of noise images in memory: 60 MB at 224 x 224."""
_TRAINED = _POOL - _POOL // HELD_OUT_SHARE
