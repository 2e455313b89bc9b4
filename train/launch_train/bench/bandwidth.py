"""Measure the bandwidth of device memory and of copies between host and device, in GB/s (1e9 bytes)."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from launch_train.bench import clock
from launch_train.bench.figures import BenchFigure

GPU_BYTES: Final = 1 << 29
"""Size of each array. 512 MiB is far larger than any GPU's cache (B200: 126 MB)."""
CPU_BYTES: Final = 1 << 27
HOST_BYTES: Final = 1 << 28


def memory(device: torch.device, budget: float, size: int | None = None) -> list[BenchFigure]:
    """Measure STREAM's copy (a = b) and triad (a = b + s c) kernels. `size`: bytes of each array.

    https://www.cs.virginia.edu/stream/ref.html
    """
    size = size or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    copy = clock.seconds(lambda: a.copy_(b), device, budget)
    triad = clock.seconds(lambda: torch.add(b, c, alpha=3.0, out=a), device, budget)
    return [gbs("memory copy", 2 * size, copy), gbs("memory triad", 3 * size, triad)]


def host(device: torch.device, budget: float, size: int = HOST_BYTES) -> list[BenchFigure]:
    """Measure copies to and from the GPU, with pinned and pageable host memory. Empty if the device is the CPU."""
    if device.type != "cuda":
        return []
    there = torch.ones(size // 4, device=device)
    pinned, pageable = torch.ones(size // 4, pin_memory=True), torch.ones(size // 4)
    return [
        _copied("to GPU, pinned", there, pinned, budget),
        _copied("to GPU, pageable", there, pageable, budget),
        _copied("from GPU, pinned", pinned, there, budget),
        _copied("from GPU, pageable", pageable, there, budget),
    ]


def _copied(name: str, to: Tensor, source: Tensor, budget: float) -> BenchFigure:
    device = to.device if to.device.type == "cuda" else source.device
    taken = clock.seconds(lambda: to.copy_(source, non_blocking=True), device, budget)
    return gbs(name, to.numel() * to.element_size(), taken)


def gbs(name: str, moved: float, seconds: float) -> BenchFigure:
    """Return a figure in GB/s. `moved`: bytes read and written."""
    return BenchFigure(name, moved / seconds / 1e9, "GB/s")
