"""The node's check before a long run."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import UnfitError, UsageError
from launch_train.node import gpu_benchmark
from launch_train.node.gpu_benchmark import check_gpu_speed
from tests.train.alone import alone
from tests.train.nodes import machines

BENCH = {contract.PREFLIGHT: "bench"}
ENV = {**BENCH, "PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}


def never() -> bool:
    return False


def test_it_is_off_unless_it_is_asked_for() -> None:
    for env in ({}, {contract.PREFLIGHT: "off"}):
        check_gpu_speed(env, 1, 8, 8, pytest.fail, never, print)
    with pytest.raises(UsageError, match="LAUNCH_PREFLIGHT='yes' must be off or bench"):
        check_gpu_speed({contract.PREFLIGHT: "yes"}, 1, 8, 8, pytest.fail, never, print)
    said: list[str] = []
    check_gpu_speed(BENCH, 0, 1, 0, said.append, never, print)
    assert said == ["preflight: skipped, no GPU found"]


@pytest.mark.slow
@alone
def test_a_machine_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of a user who has a train.py. No GPU is visible to the benchmark."""
    (tmp_path / "train.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_benchmark, "PARTS", "host,allreduce")
    monkeypatch.setattr(contract, "VISIBLE_GPUS", "OTHER")
    env = {**ENV, contract.RUN_FOLDER: str(tmp_path / "run"), contract.EXIT_FILE: str(tmp_path / "exit")}
    reports: list[bytes] = []
    check_gpu_speed(env, 3, 1, 1, print, never, reports.append)
    data = json.loads(*reports)
    assert (data["ok"], [rank["node"] for rank in data["ranks"]]) == (True, [3])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]  # what the run writes is the run's


@alone
def test_what_takes_too_long_is_ended_and_so_is_what_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_benchmark, "LIMIT", 0.3)
    began, said, reports = time.monotonic(), list[str](), list[bytes]()
    with pytest.raises(UnfitError, match="preflight: the benchmark did not finish within 0 s"):
        check_gpu_speed(ENV, 0, 1, 1, print, never, reports.append)
    check_gpu_speed(ENV, 0, 1, 1, said.append, lambda: True, reports.append)
    assert (said, reports) == (["preflight: benchmarking the GPU"], [])
    assert time.monotonic() - began < 2 * gpu_benchmark.GRACE


@pytest.mark.parametrize(
    ("code", "report", "unfit"),
    [
        (0, {"findings": []}, ""),
        (70, {"findings": [{"unfit": word != "b", "text": word} for word in "abc"]}, "a; c"),
        (1, None, "the benchmark failed with exit code 1; see the output above"),
    ],
)
def test_a_machine_is_unfit_by_its_report_which_is_kept(
    monkeypatch: pytest.MonkeyPatch, code: int, report: object, unfit: str
) -> None:
    def bench(argv: list[str], _env: object) -> SimpleNamespace:
        file = next(word for word in argv if word.startswith("--json=")).removeprefix("--json=")
        if report:
            Path(file).write_text(json.dumps(report))
        return SimpleNamespace(poll=lambda: code, kill=lambda: None)

    monkeypatch.setattr(gpu_benchmark, "Child", bench)
    said, kept = list[str](), list[bytes]()
    with pytest.raises(UnfitError, match=f"preflight: {unfit}$") if unfit else nullcontext():
        check_gpu_speed(ENV, 1, 8, 8, said.append, never, kept.append)
    assert said[0] == "preflight: benchmarking 8 GPUs"
    assert said[1:] == ([] if unfit else ["preflight: passed, GPU speed is as expected"])
    assert [json.loads(text) for text in kept] == ([report] if report else [])


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
