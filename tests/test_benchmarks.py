"""The benchmarks measure what an installed user has, and their tables say what was measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs, prices, result, tables, training, turns
from benchmarks.gpu_acceptance import sizes
from benchmarks.tables import Loop, Measured, Step, Turn
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


def test_a_table_of_steps() -> None:
    head, _, first, second, empty = tables.steps_table([PLAIN, HALF], "one process", Step(768))
    assert head == "| one process | ms a step | tokens/s | × plain loop | least to most | CPU ms a step |"
    assert first == "| plain loop | 30.00 | 25,600 | 1.000 | 1.000 to 1.000 | 30.00 |"
    assert second == "| trainer | 45.00 | 17,067 | 0.650 | 0.500 to 0.800 | 90.00 |"
    assert empty == ""


def test_every_loop_comes_first_and_last_as_often_as_the_others() -> None:
    orders = [turns.turned("abc", number) for number in range(6)]
    assert sorted(order[0] for order in orders) == sorted(order[-1] for order in orders) == list("aabbcc")
    assert all(sorted(order) == list("abc") for order in orders)
    assert sum(order.index("a") < order.index("b") for order in orders) == 3


# --- Who takes turns -------------------------------------------------------------------------------------------------


class Fake(turns.Running):
    """A loop without processes: a step takes as many seconds as its program says."""

    started: list[str]

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.started.append(loop.title)
        self.loop = loop
        turns._output(loop, folder).write_text(f"{loop.title} spoke")

    def heard(self, read: Callable[[str], Any]) -> list[Any]:
        return []

    def take(self, steps: int) -> Turn:
        return Turn(float(self.loop.program), 0.0)

    def close(self) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The titles of loops that were started."""
    monkeypatch.setattr(Fake, "started", [], raising=False)
    monkeypatch.setattr(turns, "Running", Fake)
    return Fake.started


ONE, TWO = Loop("one", "1", {}), Loop("two", "2", {})


def test_every_loop_is_restarted_in_each_round(fake: list[str]) -> None:
    first, second = turns.measure([ONE, TWO], Amount(rounds=3, turns=2, steps=1))
    assert sorted(fake) == ["one"] * 3 + ["two"] * 3
    assert first.rounds == tuple([Turn(1.0, 0.0)] * 2 for _ in range(3))
    assert (second.rounds[0][0].wall, second.said) == (2.0, "two spoke")


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Real ones, whose steps are nothing, and which import no torch. Programs: "goes", "ends"."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/__init__.py").write_text(f"__path__.append({str(turns.ROOT / 'benchmarks')!r})")
    (tmp_path / "benchmarks/loops.py").write_text(PROGRAM)
    monkeypatch.setattr(turns, "ROOT", tmp_path)
    return tmp_path


PROGRAM = """
import os, sys
from benchmarks import turns
turns._finished = lambda: None
mine = turns.here()
print(os.environ.get("RANK"), os.listdir(os.environ["LAUNCH_RUN_FOLDER"]), flush=True)
for step in range(3 if sys.argv[1] == "ends" else 1_000_000):
    mine.step()
"""


def test_all_ranks_of_a_loop_take_its_turns(processes: Path) -> None:
    loop = Loop("goes", "goes", {"writes": True}, ranks=2)
    (found,) = turns.measure([loop], Amount(rounds=2, turns=3, steps=100, warm_up=1))
    assert [len(each) for each in found.rounds] == [3, 3]
    assert all(turn.wall > 0 and turn.cpu >= 0 for each in found.rounds for turn in each)
    assert found.said == "0 []\n"  # in an empty run folder


def test_a_loop_that_comes_to_an_end_is_an_error(processes: Path) -> None:
    loop = Loop("too short", "ends", {"writes": True})
    with pytest.raises(RuntimeError, match="too short ended"):
        turns.measure([loop], Amount(rounds=1, turns=1, steps=1000, warm_up=1))


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
