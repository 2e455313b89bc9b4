"""The benchmarks measure what an installed user has, and their tables say what was measured."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks import jobs, prices, result, tables, training
from benchmarks.gpu_acceptance import sizes
from benchmarks.tables import Loop, Measured, Turn
from benchmarks.turns import Amount
from launch_train.common.config import parse
from launcher import catalog


def test_the_check_totals_of_the_list_prices(capsys: pytest.CaptureFixture[str]) -> None:
    found = {name: (published, usd) for name, published, usd in prices.totals(catalog.load())}
    assert found.keys() == {"a3-highgpu-8g", "a3-ultragpu-8g", "a2-ultragpu-8g", "g4-standard-48", "n1-standard-4"}
    assert all(usd == pytest.approx(published, abs=1e-6) for published, usd in found.values())
    assert prices.main() == 0
    assert "| a3-highgpu-8g | 88.490000 | 88.490000 |" in capsys.readouterr().out


# --- What is made of turns -------------------------------------------------------------------------------------------


def measured(title: str, *rounds: list[float], cpu: float = 1.0, said: str = "") -> Measured:
    """A loop whose turns took so many milliseconds a step, and `cpu` times that in CPU time."""
    found = [[Turn(1e-3 * ms, 1e-3 * ms * cpu) for ms in turns] for turns in rounds]
    return Measured(Loop(title, "trainer" if "trainer" in title else "plain", {}), found, said)


PLAIN = measured("plain loop", [10.0, 20.0, 30.0], [40.0, 40.0, 40.0])
HALF = measured("trainer", [20.0, 40.0, 60.0], [40.0, 50.0, 60.0], cpu=2.0)


def test_loops_are_compared_turn_by_turn_and_then_round_by_round() -> None:
    assert tables.speed(HALF, PLAIN) == pytest.approx((0.65, 0.5, 0.8))
    ours, theirs = measured("trainer", [40.0, 20.0, 30.0]), measured("plain", [10.0, 20.0, 60.0])
    assert tables.speed(ours, theirs).middle == 1.0  # of 1/4, 1 and 2; not 20/30, the ratio of the medians
    assert tables.more_wall(HALF, PLAIN) == pytest.approx((0.015, 0.010, 0.020))
    assert tables.more_cpu(HALF, PLAIN) == pytest.approx((0.060, 0.060, 0.060))
    assert tables.wall(HALF) == pytest.approx((0.045, 0.040, 0.050))


# --- What they are told ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [jobs.NANOGPT, jobs.HARDLY, sizes.REAL.gpt, sizes.SHRUNK.gpt])
def test_the_trainer_understands_the_jobs(shape: dict[str, int]) -> None:
    told = {**jobs.JOB, "text": "text", "shape": shape}
    parsed = parse(jobs.config(told, precision="bf16", compile=True, cuda_graphs=True))
    assert (parsed.steps, parsed.batch_size, parsed.eval.every) == (jobs.STEPS, 12, 0)
    assert parsed.model._asdict().items() >= shape.items()
    assert parse(jobs.config({**told, "steps": 1, "warmup_steps": 1})).steps == 1  # what starts.start tells it


def test_a_result_has_its_command_and_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["training.py", "--write"])
    training.conclude("training", Amount(6, 4, 10), "hardware", lambda: ["| table |", ""], write=True)
    training.conclude("unwritten", Amount(6, 4, 10), "hardware", lambda: ["| table |", ""], write=False)
    (written,) = tmp_path.iterdir()
    assert re.fullmatch(r"training-\d{4}-\d\d-\d\d\.md", written.name)
    assert "`python -m benchmarks.training --write`: 6 rounds of 4 turns of 10 steps, 0.0 minutes. hardware." in (
        written.read_text()
    )
