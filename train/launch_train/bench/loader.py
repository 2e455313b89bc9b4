"""Samples a second that a DataLoader gives, by its number of workers: JPEGs decoded, cut out and made a tensor."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from launch_train.bench.figures import Figure
from launch_train.bench.matmul import cores, threads
from launch_train.common.text import plural

SIZE: Final = (500, 375)
"""Pixels across and down: the commonest size of ImageNet's photographs."""
CUT: Final = 224
BATCH: Final = 8
MOST_WORKERS: Final = 16


def measure(budget: float, quick: bool) -> list[Figure]:
    """For each number of workers, `budget` seconds. On one thread, as a worker has it, and a process of torchrun's too:
    more of them only get in each other's way over one picture."""
    data = Photographs(photograph())
    with threads(1):
        return [
            Figure(f"loader, {plural(count, 'worker')}", rate(data, count, budget), "samples/s")
            for count in counts(quick)
        ]


def counts(quick: bool, most: int | None = None) -> tuple[int, ...]:
    """No worker, then 1, 2, 4 … and as many as there are cores, but 16 at most; quick: none, and as many as cores."""
    most = min(most or cores(), MOST_WORKERS)
    doubled = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return (0, most) if quick else (0, *doubled, most)


class Photographs(Dataset[Tensor]):
    """One JPEG, decoded anew for each sample."""

    def __init__(self, jpeg: bytes) -> None:
        self._jpeg = jpeg

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        """[3, 224, 224] in 0…1: another part of it for each index, so that none is cheaper than the others."""
        from PIL import Image

        left, top = index % (SIZE[0] - CUT), index % (SIZE[1] - CUT)
        with Image.open(io.BytesIO(self._jpeg)) as image:
            cut = image.convert("RGB").resize((CUT, CUT), box=(left, top, left + CUT, top + CUT))
        return torch.from_numpy(np.array(cut)).permute(2, 0, 1).float() / 255


def photograph() -> bytes:
    """A JPEG of quality 85: noise over a slope, of some 100 KB, as ImageNet's are."""
    from PIL import Image

    across, down = SIZE
    noise = np.random.default_rng(0).normal(0, 12, (down, across, 3))
    slope = np.linspace(0, 200, across)[None, :, None] + np.linspace(0, 40, down)[:, None, None]
    file = io.BytesIO()
    Image.fromarray(np.clip(slope + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def rate(data: Dataset[Tensor], workers: int, budget: float) -> float:
    """Samples a second, after each worker's first two batches: the start of the workers doesn't count."""
    batches = iter(DataLoader(data, batch_size=BATCH, num_workers=workers))
    for _ in range(max(1, 2 * workers)):
        next(batches)
    return _per_second(batches, budget)


def _per_second(batches: Iterator[Tensor], budget: float) -> float:
    seen, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < budget or not seen:
        seen += len(next(batches))
    return seen / (now - began)
