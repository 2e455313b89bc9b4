"""A run that fails and starts again: what its end says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher.runs.run_folder import restarts
from tests.command import launch

FAILS_AT_STEP_3 = """
from launch_train import metrics
for step in range(1, 10):
    if step == 3:
        raise ValueError("a bad sample")
    metrics.log(step, loss=1.0)
"""
FAILS_ONCE = """
import os
from launch_train import metrics
metrics.log(1, loss=1.0)
raise SystemExit(os.environ["LAUNCH_GENERATION"] == "0")
"""


def job(folder: Path, script: str, run: str = "{script: work.py, launcher: python}") -> Path:
    (folder / "work.py").write_text(script)
    (folder / "job.yaml").write_text(f"name: job\nmachine: {{type: l4, gpus: 1}}\nrun: {run}\nregions: any\n")
    return folder / "job.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("output", [(), ("--output", "runs")])
def test_a_recovered_failure_counts_as_a_restart(tmp_path: Path, output: tuple[str, ...]) -> None:
    spec = job(tmp_path, FAILS_ONCE)
    ran = launch("local", spec, *output, "-o", "json", cwd=tmp_path)
    assert (ran.code, json.loads(ran.out)["restarts"]) == (0, 1), ran.err
    if output:
        again = launch("local", spec, *output, cwd=tmp_path)
        assert "restarts  1\n" in again.out


def test_an_immediate_success_has_no_restarts(tmp_path: Path) -> None:
    ran = launch("local", job(tmp_path, "pass"), "--output", "runs", "-o", "json", cwd=tmp_path)
    assert json.loads(ran.out)["restarts"] == 0


@pytest.mark.slow
def test_a_repeated_failure_is_restarted_once_and_reported_once(tmp_path: Path) -> None:
    ran = launch("local", job(tmp_path, FAILS_AT_STEP_3), "--output", "runs", cwd=tmp_path)
    assert ran.code == 3
    assert "restarts  1\n" in ran.out
    assert ran.err.count("Traceback") == 1
    assert "error: the job failed: ValueError: a bad sample (work.py:5, after step 2)\n" in ran.err


def test_arguments_that_argparse_refuses_are_the_reason(tmp_path: Path) -> None:
    script = "import argparse; argparse.ArgumentParser().parse_args()"
    spec = job(tmp_path, script, "{script: work.py, launcher: python, args: [--x, '1']}")
    ran = launch("local", spec, cwd=tmp_path)
    assert ran.code == 3
    assert "restarting" not in ran.err
    assert "error: the job failed: unrecognized arguments: --x 1\n" in ran.err


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_that_needs_a_gpu(tmp_path: Path) -> None:
    ran = launch("local", job(tmp_path, "import torch; torch.cuda.set_device(0)"), cwd=tmp_path)
    assert ran.code == 3
    problem, *hint = ran.err.rpartition("error: ")[2].splitlines()
    assert "_cuda_setDevice" in problem
    assert problem.endswith("this script needs a GPU")
    assert any("torch.cuda.is_available()" in line for line in hint)


def test_restarts_of_all_attempts_are_counted(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for name, text in {"0001.generation": b"2\n", "0002.generation": b"1\n", "0001.json": b"{}"}.items():
        storage.write(f"{runfolder.ATTEMPTS}/{name}", text)
    assert restarts(storage) == 3
