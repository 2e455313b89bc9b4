"""The node's check before a long run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.node import gpu_benchmark
from launch_train.node.gpu_benchmark import Result, check_gpu_speed, run_gpu_bench
from tests.train.alone import alone
from tests.train.nodes import machines

ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
BENCH = {contract.PREFLIGHT: "bench"}


def never() -> bool:
    return False


def test_it_is_off_unless_it_is_asked_for() -> None:
    for env in ({}, {contract.PREFLIGHT: "off"}):
        check_gpu_speed(env, 1, 8, 8, pytest.fail, never, print)
    with pytest.raises(UsageError, match="LAUNCH_PREFLIGHT='yes' must be off or bench"):
        check_gpu_speed({contract.PREFLIGHT: "yes"}, 1, 8, 8, pytest.fail, never, print)


@pytest.mark.slow
@alone
def test_a_machine_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of a user who has a train.py."""
    (tmp_path / "train.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    env = {**ENV, contract.RUN_FOLDER: str(tmp_path / "run"), contract.EXIT_FILE: str(tmp_path / "exit")}
    done = run_gpu_bench(env, 3, processes=1, gpus=0, stopped=never, parts="host,allreduce")
    assert done.problem == ""
    data = json.loads(done.report)
    assert (data["ok"], [rank["node"] for rank in data["ranks"]]) == (True, [3])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # what the run writes is the run's


@alone
def test_what_takes_too_long_is_ended_and_so_is_what_is_stopped() -> None:
    began = time.monotonic()
    late = run_gpu_bench(ENV, 0, processes=1, gpus=0, stopped=never, limit=0.3)
    assert late == Result("the benchmark did not finish within 0 s")
    assert run_gpu_bench(ENV, 0, processes=1, gpus=0, stopped=lambda: True) == Result()
    assert time.monotonic() - began < 2 * gpu_benchmark.GRACE


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the measuring finds, one after the other."""
    results: list[Result] = []
    monkeypatch.setattr(gpu_benchmark, "run_gpu_bench", lambda *_, **__: results.pop(0))
    return results


def test_a_slow_machine_is_unfit_and_its_figures_are_kept(told: list[Result]) -> None:
    told += [Result("", b"{1}"), Result("GPU 3 of node 1 is 28 % slower", b"{2}"), Result("dead")]
    said: list[str] = []
    kept: list[bytes] = []
    check_gpu_speed(BENCH, 1, 8, 8, said.append, never, kept.append)
    assert said == ["preflight: benchmarking 8 GPUs", "preflight: passed, GPU speed is as expected"]
    with pytest.raises(UnfitError, match="preflight: GPU 3 of node 1 is 28 % slower"):
        check_gpu_speed(BENCH, 1, 8, 8, said.append, never, kept.append)
    with pytest.raises(UnfitError, match="preflight: dead"):
        check_gpu_speed(BENCH, 1, 1, 1, said.append, never, kept.append)
    assert kept == [b"{1}", b"{2}"]


def test_the_problem_is_what_the_verdict_calls_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [{"unfit": True, "text": "a"}, {"unfit": False, "text": "b"}, {"unfit": True, "text": "c"}]

    def bench(argv: list[str], _env: object) -> SimpleNamespace:
        file = next(word for word in argv if word.startswith("--json=")).removeprefix("--json=")
        Path(file).write_text(json.dumps({"findings": findings}))
        return SimpleNamespace(poll=lambda: 70, kill=lambda: None)

    monkeypatch.setattr(gpu_benchmark, "Child", bench)
    assert run_gpu_bench(ENV, 0, processes=1, gpus=1, stopped=never).problem == "a; c"


def test_a_node_without_gpus_goes_on(told: list[Result]) -> None:
    said: list[str] = []
    check_gpu_speed(BENCH, 0, 1, 0, said.append, never, print)
    assert said == ["preflight: skipped, no GPU found"]


def test_a_node_that_is_stopped_meanwhile_claims_nothing(told: list[Result]) -> None:
    told += [Result()]
    said: list[str] = []
    check_gpu_speed(BENCH, 0, 1, 1, said.append, lambda: True, print)
    assert said == ["preflight: benchmarking the GPU"]


@pytest.mark.slow
def test_a_node_whose_gpus_are_ill_never_starts_the_program(tmp_path: Path) -> None:
    """Its nvidia-smi finds a GPU, and torch can't use it."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 'NVIDIA L4, 570.86.15'\n")
    smi.chmod(0o755)
    path = f"{smi.parent}:{os.environ['PATH']}"
    with machines(tmp_path) as site:
        site.script("print('at work')")
        node = site.start("--script", "work.py", env={**BENCH, contract.PROCESSES: "1", "PATH": path})
        assert node.wait() == contract.Exit.UNFIT, node.text
        assert "launch: node 0: preflight: the benchmark failed with exit code 70" in node.text
        assert node.text.count("but torch") == 1, "one line of what is wrong"
        assert "at work" not in node.text
        assert not (site.run_folder / runfolder.TERMINAL).exists()  # another machine may do it
        assert site.left_over() == []
