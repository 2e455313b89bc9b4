"""Measure a DataLoader's samples per second by number of workers: JPEGs decoded, cropped and converted to tensors."""

from __future__ import annotations

import io
import time
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from launch_train.bench.figures import BenchFigure
from launch_train.bench.matmul import threads
from launch_train.common.cgroup import cores
from launch_train.common.text import plural

SIZE: Final = (500, 375)
"""Width and height in pixels: the most common size in ImageNet."""
CUT: Final = 224
BATCH: Final = 8
MOST_WORKERS: Final = 16


def measure(budget: float, quick: bool) -> list[BenchFigure]:
    """Measure `budget` seconds for each number of workers.

    torch uses one thread, as in workers and under torchrun: more threads don't speed up decoding one image.
    """
    data = Photographs(photograph())
    with threads(1):
        return [
            BenchFigure(f"loader, {plural(count, 'worker')}", rate(data, count, budget), "samples/s")
            for count in counts(quick)
        ]


def counts(quick: bool, most: int | None = None) -> tuple[int, ...]:
    """Return the numbers of workers: 0, 1, 2, 4 … up to the cores, at most 16; quick: only the first and the last."""
    most = min(most or cores(), MOST_WORKERS)
    doubled = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return (0, most) if quick else (0, *doubled, most)


class Photographs(Dataset[Tensor]):
    """A dataset of one JPEG, which is decoded again for each sample."""

    def __init__(self, jpeg: bytes) -> None:
        self._jpeg = jpeg

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        """Return a crop [3, 224, 224] in the range 0 to 1; its position depends on the index."""
        from PIL import Image

        left, top = index % (SIZE[0] - CUT), index % (SIZE[1] - CUT)
        with Image.open(io.BytesIO(self._jpeg)) as image:
            cut = image.convert("RGB").resize((CUT, CUT), box=(left, top, left + CUT, top + CUT))
        return torch.from_numpy(np.array(cut)).permute(2, 0, 1).float() / 255


def photograph() -> bytes:
    """Return a JPEG of quality 85: a gradient with noise, about 100 KB like ImageNet's images."""
    from PIL import Image

    across, down = SIZE
    noise = np.random.default_rng(0).normal(0, 12, (down, across, 3))
    slope = np.linspace(0, 200, across)[None, :, None] + np.linspace(0, 40, down)[:, None, None]
    file = io.BytesIO()
    Image.fromarray(np.clip(slope + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def rate(data: Dataset[Tensor], workers: int, budget: float) -> float:
    """Return samples per second, measured after two batches per worker to exclude the start of the workers."""
    batches = iter(DataLoader(data, batch_size=BATCH, num_workers=workers))
    for _ in range(max(1, 2 * workers)):
        next(batches)
    seen, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < budget or not seen:
        seen += len(next(batches))
    return seen / (now - began)
