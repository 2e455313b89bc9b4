"""A model, data and a loss of the user's in the built-in trainer, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch_train import checkpoint
from launch_train.common import contract
from tests.train.forked import Forked
from tests.train.trainer.test_determinism import environment, losses

EXAMPLE = Path(contract.__file__).parents[3] / "job_specs" / "examples" / "tiny"
CONFIG: dict[str, Any] = {
    "model": {"name": "model:build", "width": 16, "depth": 2},
    "data": {"path": "data:build", "settings": {"samples": 200}},
    "loss": "losses:loss",
    "steps": 12,
    "batch_size": 16,
    "optimizer": {"lr": 1e-2},
    "eval": {"every": 6, "batches": 1},
    "loader": {"workers": 0},
    "monitor": 0,
}


def with_code(folder: Path) -> dict[str, str]:
    return environment(folder, CONFIG) | {contract.CODE: str(EXAMPLE), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_it_learns_the_same_on_one_rank_and_on_two(tmp_path: Path, forked: Forked) -> None:
    for name, ranks in (("one", 1), ("two", 2)):
        done = forked(with_code(tmp_path / name), ranks)
        assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one[0] == pytest.approx(two[0], abs=2e-4)
    assert one[1] == pytest.approx(two[1], abs=2e-4)
    assert one[0][-1] < one[0][0]
    assert {name.partition(".")[0] for name in checkpoint.load(str(tmp_path / "two"))["model"]} == {"model"}
