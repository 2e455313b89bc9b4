"""The examples of job_specs/ that bring a model of their own: `launch local` runs them on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import SPECS
from tests.e2e.running import losses, only_run, records, succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FEW = ("--gpus", "2", "--set", "run.config.log_every=4", "--output")


def test_a_model_data_and_a_loss_of_ones_own(tmp_path: Path) -> None:
    short = ("--set", "run.config.steps=40", "--set", "run.config.eval.every=20")
    ran = succeeded("local", SPECS / "own-model.yaml", *short, *FEW, tmp_path / "out", cwd=tmp_path)
    folder = only_run(tmp_path / "out")
    assert "all 2 ranks agree" in ran.stderr
    assert losses(folder)[-1] < 0.6 * losses(folder)[0]
    assert [record["step"] for record in records(folder) if record.get("event") == "eval"] == [20, 40]


def test_a_llama_of_transformers(tmp_path: Path) -> None:
    small = ("steps=4", "batch_size=4", "eval.every=0", "model.hidden_size=48", "data.block_size=64")
    sets = [word for setting in small for word in ("--set", f"run.config.{setting}")]
    ran = succeeded("local", SPECS / "hf-llama.yaml", *sets, *FEW, tmp_path / "out", cwd=tmp_path)
    assert "all 2 ranks agree" in ran.stderr
    assert len(losses(only_run(tmp_path / "out"))) == 4
