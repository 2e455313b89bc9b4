"""Data of one's own: `build` returns a map-style data set, of which the trainer makes batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset):
    """Points on `arms` spirals, with the number of the arm: which one is it?"""

    def __init__(self, samples: int, arms: int, noise: float, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.arm = torch.randint(arms, (samples,), generator=made)
        radius = torch.rand(samples, generator=made).sqrt()
        angle = 2 * math.pi * (self.arm / arms + 0.8 * radius)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + noise * torch.randn(samples, 2, generator=made)

    def __len__(self) -> int:
        return len(self.arm)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.arm[index]


def build(split: str, samples: int = 4096, arms: int = 3, noise: float = 0.02) -> Dataset:
    """`split` is train or held_out; the rest is what the spec says in data.settings."""
    held_out = split == "held_out"
    return Spirals(samples // 8 if held_out else samples, arms, noise, seed=1 if held_out else 0)
