"""Measure matrix products: TFLOP/s per number format, and the speed-up of the GPU over the whole CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from launch_train.bench import clock
from launch_train.bench.figures import BenchFigure
from launch_train.common.cgroup import cores

DTYPES: Final = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GPU_SIZE: Final = 8192
"""Rows and columns. A product of 1.1 TFLOP is large enough to use every GPU fully."""
CPU_SIZE: Final = 1024
ON_CPU: Final = "matmul CPU fp32"
SPEED_UP: Final = "GPU/CPU fp32"


def measure(device: torch.device, budget: float, *, host: bool, size: int | None = None) -> list[BenchFigure]:
    """Measure TFLOP/s of this process's device in each number format, for `budget` seconds each.

    With `host`, and if the device is a GPU, also measure the CPU, on all cores that this process may use.
    """
    is_gpu = device.type == "cuda"
    size = size or (GPU_SIZE if is_gpu else CPU_SIZE)
    figures = [BenchFigure(name(kind), tflops(device, kind, size, budget), "TFLOP/s") for kind in kinds(device)]
    if host and is_gpu:
        with threads(cores()):
            on_cpu = tflops(torch.device("cpu"), "fp32", 2 * CPU_SIZE, budget)
        figures += [BenchFigure(ON_CPU, on_cpu, "TFLOP/s"), BenchFigure(SPEED_UP, figures[0].value / on_cpu, "x")]
    return figures


def name(kind: str) -> str:
    """Return the figure's name."""
    return f"matmul {kind}"


def kinds(device: torch.device) -> tuple[str, ...]:
    """Return the number formats to measure, fp32 first.

    bf16 and TF32 need Ampere or newer; older GPUs only emulate them. A CPU may emulate bf16, too.
    """
    if device.type != "cuda":
        return ("fp32", "bf16")
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return ("fp32", "tf32", "fp16", "bf16") if ampere else ("fp32", "fp16")


def tflops(device: torch.device, kind: str, size: int, budget: float) -> float:
    """Measure the TFLOP/s of a product of two square matrices, which takes 2 size^3 operations.

    The matrices are random: zeros take less power, so the GPU would seem faster than it is.
    """
    a, b = (torch.randn(size, size, device=device).to(DTYPES[kind]) for _ in range(2))
    out = torch.empty_like(a)
    with tf32(kind == "tf32"):
        return 2 * size**3 / clock.seconds(lambda: torch.mm(a, b, out=out), device, budget) / 1e12


@contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 products inside the context."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of CPU threads inside the context. The default is 1 under torchrun, else one per core."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
