"""Train with all ranks on GPU 0: torchrun --nproc-per-node 2 -m benchmarks.gpu_acceptance.one_gpu BACKEND

NCCL refuses two ranks on one GPU of one host, so each rank names another host (NCCL_HOSTID); they talk over sockets.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"

import torch
import torch.distributed as dist

from launch_train.distributed import process_group

BACKEND = sys.argv[1]
JOIN = dist.init_process_group


def _first_gpu(_local_rank: int, _visible: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    process_group.use_device(device)
    return device


def _init(_backend: str, device_id: Any = None, **more: Any) -> None:
    JOIN(BACKEND, device_id=device_id if BACKEND == "nccl" else None, **more)


if __name__ == "__main__":
    setattr(process_group, "_device", _first_gpu)  # noqa: B010 - mypy refuses to assign another function
    setattr(dist, "init_process_group", _init)  # noqa: B010 - as above
    sys.argv[1:] = []
    runpy.run_module("launch_train", run_name="__main__")
