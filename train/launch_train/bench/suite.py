"""Run all parts of the benchmark in turn, on all ranks at the same time, as in training."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch

from launch_train.bench import amp, bandwidth, collective, loader_benchmark, matmul
from launch_train.bench.figures import BenchFigure, Measured, Trouble
from launch_train.common import contract
from launch_train.common.errors import UnfitError
from launch_train.common.text import one_line
from launch_train.distributed.process_group import Ranks, barrier, gather

QUICK: Final = 0.3
WHOLE: Final = 1.5
"""Seconds of measuring for each figure."""


def run(
    ranks: Ranks, parts: Sequence[str], *, quick: bool, env: Mapping[str, str], say: Callable[[str], None]
) -> list[Measured]:
    """Measure the parts, and return the measurements of all ranks, in order, on every rank.

    `say` is called with each part's name before it starts.
    """
    figures: list[BenchFigure] = []
    troubles: list[Trouble] = []
    seconds: dict[str, float] = {}
    for part in parts:
        barrier(ranks)
        say(part)
        began = time.monotonic()
        try:
            figures += _part(part, ranks, quick)
        except (RuntimeError, OSError, ImportError, UnfitError) as error:  # torch.OutOfMemoryError is a RuntimeError
            troubles.append(Trouble(part, one_line(error, 200)))
        if ranks.device.type == "cuda":
            with suppress(RuntimeError):  # after some CUDA errors every call fails
                torch.cuda.empty_cache()
        seconds[part] = round(time.monotonic() - began, 2)
    barrier(ranks)
    is_gpu = ranks.device.type == "cuda"
    measured = Measured(
        rank=ranks.rank,
        node=int(env.get(contract.NODE) or env.get("GROUP_RANK") or 0),
        gpu=ranks.local_rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(ranks.device) if is_gpu else "cpu",
        figures=tuple(figures),
        troubles=tuple(troubles),
        pcie=pcie_of(ranks.device) if is_gpu else None,
        seconds=seconds,
    )
    return gather(ranks, measured)


def _part(part: str, ranks: Ranks, quick: bool) -> list[BenchFigure]:
    """Measure one part. Figures of the node are measured by its first rank while the others wait."""
    device, budget, first = ranks.device, QUICK if quick else WHOLE, ranks.local_rank == 0
    match part:
        case "matmul":
            return matmul.measure(device, budget, host=first)
        case "memory":
            return bandwidth.memory(device, budget)
        case "host":
            return bandwidth.host(device, budget)
        case "allreduce":
            return collective.measure(ranks, collective.QUICK if quick else collective.SIZES, budget)
        case "amp":
            return amp.measure(device, 2 * budget, quick)
        case _:
            return loader_benchmark.measure(2 * budget, quick) if first else []


def pcie_of(device: torch.device) -> tuple[int, int] | None:
    """Return the maximum generation and lanes of the GPU's link from nvidia-smi, or None if unknown."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "-i", uuid]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return link(done.stdout)


def link(text: str) -> tuple[int, int] | None:
    """Parse `4, 16`; return None for `[N/A]`, which nvidia-smi prints in some VMs."""
    parts = [part.strip() for part in text.split(",")]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None
