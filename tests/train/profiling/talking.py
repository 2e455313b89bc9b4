"""A program for torchrun, or for what sets its variables: ranks that exchange large gradients and calculate next to
nothing. Rank 0 profiles it, and waits for the other.

torchrun --nproc-per-node 2 talking.py RUN_FOLDER
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launch_train.common import contract
from launch_train.common.config import Profile
from launch_train.distributed import process_group
from launch_train.profiling.advice import Setup
from launch_train.profiling.profiler import ProfileReport, Recording
from launch_train.telemetry.metric_sink import Sink

LATE = 0.8
"""Seconds by which rank 1 is late in each step: rank 0 waits for longer than it works, on a slow machine too."""


class Large(nn.Module):
    """13 million parameters in pieces that the allocator keeps, each of which is only added up."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.zeros(128 * 1024) for _ in range(100))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([piece.mean() for piece in self.pieces]).sum() * x.mean()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    ranks = process_group.join(os.environ)
    model = DistributedDataParallel(Large(), gradient_as_bucket_view=True, static_graph=True)
    report = ProfileReport({contract.RUN_FOLDER: folder}, Sink(), Setup())
    recording = Recording(Profile(2, 1, 2), ranks.device, report)
    for step in range(1, 6):
        if ranks.rank:
            time.sleep(LATE)
        with recording.range("data"):
            batch = torch.ones(4)
        with recording.range("forward"):
            loss = model(batch)
        with recording.range("backward"):
            loss.backward()
        with recording.range("optimizer"):
            model.zero_grad(set_to_none=True)
        if ranks.rank == 0:
            recording.stepped(step)
    if ranks.rank == 0:
        recording.close()
    process_group.finish(ranks)


if __name__ == "__main__":
    main(sys.argv[1])
