"""Real steps on this machine's CPU, each kind with a bottleneck made on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch_train.common import contract
from launch_train.common.config import Profile
from launch_train.profiling.advice import Setup
from launch_train.profiling.profiler import ProfileReport, Recording
from launch_train.telemetry.metric_sink import Sink
from tests.train.nodes import free_port

ROOT = Path(contract.__file__).parents[2]
SHORT = Profile(1, 1, 2)

pytestmark = pytest.mark.usefixtures("one_thread")


def recorded(model: nn.Module, batch: Callable[[], Tensor], folder: Path) -> dict[str, Any]:
    """The verdict on a few steps of a loop like the trainer's."""
    recording = Recording(
        SHORT, torch.device("cpu"), ProfileReport({contract.RUN_FOLDER: str(folder)}, Sink(), Setup())
    )
    for step in range(1, sum(SHORT) + 2):
        with recording.range("data"):
            x = batch()
        with recording.range("forward"):
            loss = model(x)
        with recording.range("backward"):
            loss.backward()
        with recording.range("optimizer"):
            model.zero_grad(set_to_none=True)
        recording.stepped(step)
    recording.close()
    data: dict[str, Any] = json.loads((folder / "profile" / "verdict.json").read_text())
    return data


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.layers(x).mean()
        return mean


class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(200_000))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x * self.scale + 0.1
        return x.mean()


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1000):
            x = x * self.scale
        return x.mean()


class Reads(nn.Module):
    """Asks for one value over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        loss = (x * self.scale).mean()
        return loss + 0 * sum(map(Tensor.item, [loss.detach()] * 5000))


def slowly() -> Tensor:
    time.sleep(0.05)
    return torch.ones(8, 512)


@pytest.mark.parametrize(
    ("model", "batch", "bound", "change"),
    [
        (Matrices, slowly, "input", "loader.workers"),
        (Matrices, lambda: torch.ones(512, 512), "compute", ""),
        (Elementwise, lambda: torch.ones(4, 200_000), "memory", ""),
        (Tiny, lambda: torch.ones(4), "launch_overhead", "batch_size"),
        (Reads, lambda: torch.ones(4), "host_sync", ""),
    ],
)
def test_the_bottleneck_is_found(
    tmp_path: Path, model: Callable[[], nn.Module], batch: Callable[[], Tensor], bound: str, change: str
) -> None:
    for number in range(5):  # two steps take milliseconds: a busy machine may just have interrupted them
        found = recorded(model(), batch, tmp_path / str(number))
        if found["shares"][bound] > 0.5:
            break
    assert (found["bound"], found["change"]) == (bound, change)
    assert found["shares"][bound] > 0.5
    assert found["steps"] == 2
    assert found["which"] == "3-4"


@pytest.mark.slow
def test_ranks_that_talk_more_than_they_calculate(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("talking.py"))
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    env |= {"MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([sys.executable, program, str(tmp_path)], env=env | {"RANK": rank}, stderr=subprocess.PIPE)
        for rank in "01"
    ]
    for rank in ranks:
        assert (rank.communicate(timeout=120)[1], rank.returncode) == (b"", 0)
    found = json.loads((tmp_path / "profile" / "verdict.json").read_text())
    assert (found["bound"], found["change"]) == ("communication", "batch_size"), found


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "bound"), [(8192, "compute"), (2, "launch_overhead")])
def test_on_a_gpu(tmp_path: Path, batch: int, bound: str) -> None:
    """Large matrices, and tiny ones that are launched one by one."""
    device = torch.device("cuda")
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(50))).to(device)
    recording = Recording(SHORT, device, ProfileReport({contract.RUN_FOLDER: str(tmp_path)}, Sink(), Setup(gpu=True)))
    for step in range(1, sum(SHORT) + 1):
        with recording.range("data"):
            x = torch.ones(batch, 1024, device=device)
        with recording.range("forward"):
            loss = model(x).mean()
        with recording.range("backward"):
            loss.backward()
        model.zero_grad(set_to_none=True)
        recording.stepped(step)
    recording.close()
    assert json.loads((tmp_path / "profile" / "verdict.json").read_text())["bound"] == bound
