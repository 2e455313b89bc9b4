"""Whole runs on data that other processes make: on one rank and on two, stopped and gone on with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from launch_train.common import contract
from tests.train.forked import Ended, Forked
from tests.train.trainer.test_determinism import environment, losses

CODE = """
import torch
from torch import nn

class Points:
    def __init__(self, count, bad):
        self.count, self.bad = count, bad
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("broken")
        x = torch.randn(8)
        return x, x.sum() + index

def data(split, bad=-1, rest=12):
    return (Points(rest, -1) if rest else None) if split == "held_out" else Points(30, bad)

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 1)
    def forward(self, x, y):
        return ((self.line(x)[:, 0] - y) ** 2).mean()

def model():
    return Line()
"""


def run(forked: Forked, folder: Path, ranks: int, workers: int, steps: int = 9, **settings: Any) -> tuple[Ended, Path]:
    (folder.parent / "points.py").write_text(CODE)
    config = {
        "model": "points:model",
        "data": {"path": "points:data", "settings": settings},
        "loader": {"workers": workers},
        "steps": steps,
        "batch_size": 8,
        "eval": {"every": 4, "batches": 2},
        "log_every": 2,
        "monitor": 0,  # its warnings are about this machine
        "optimizer": {"warmup_steps": 0, "min_lr": 1e-2, "lr": 1e-2},
    }
    env = environment(folder, config) | {contract.CODE: str(folder.parent)}
    return forked(env, ranks), folder


@pytest.mark.slow
def test_ranks_and_processes_change_nothing_but_the_rounding(tmp_path: Path, forked: Forked) -> None:
    """Thirty samples, eight at a time: the fourth step begins another epoch."""
    one, alone = run(forked, tmp_path / "one", 1, 0)
    assert one.returncode == 0, one.stderr
    two, both = run(forked, tmp_path / "two", 2, 1)
    assert two.returncode == 0, two.stderr
    assert losses(alone)[0] == pytest.approx(losses(both)[0], rel=1e-4)
    assert losses(alone)[1] == pytest.approx(losses(both)[1], rel=1e-4)
    assert two.stderr.strip() == one.stderr.strip() == ""
    assert "loader       main process: set in the spec" in one.stdout
    assert "loader       1 process: set in the spec" in two.stdout


def test_a_sample_that_one_rank_can_not_make_ends_all_of_them(tmp_path: Path, forked: Forked) -> None:
    began = time.monotonic()
    done, folder = run(forked, tmp_path / "run", 2, 1, steps=100_000, bad=7, rest=0)
    assert time.monotonic() - began < 60
    said = [line for line in done.stderr.splitlines() if line.startswith("train: ")]
    assert said == ["train: data: points:data [7] failed at points.py:12: ValueError: broken"]
    assert "2" in Path(f"{folder}.exit").read_text().split()
    assert done.stdout.count("points:data provides no held_out data (it returns None); evaluation is off") == 1
