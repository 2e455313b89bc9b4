"""`checkpoint.keep.best`: the checkpoints with the lowest held-out loss stay, whoever wrote them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch_train import checkpoint, runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import multipart_writer, retention
from launch_train.checkpointing.manifest import CheckpointError
from launch_train.common import contract
from launch_train.common.config import parse, problems
from launch_train.common.storage import LocalFolder
from launch_train.export import export, find_checkpoint
from launch_train.performance import loss_normalization
from launch_train.trainer import shutdown
from tests.train import trials
from tests.train.forked import Forked
from tests.train.trials import differences, losses, preempted, read, train, waiting_for_saves

pytestmark = pytest.mark.usefixtures("one_thread")

LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 4.0, 12: 5.0}
"""The held-out loss by step."""
CONFIG: dict[str, Any] = {"steps": 12, "eval": {"every": 2, "batches": 1}}
BEST: dict[str, Any] = {**CONFIG, "checkpoint": {"minutes": "off", "keep": {"last": 1, "best": 2}}}


@pytest.fixture
def valley(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Held-out losses that fall and rise again."""
    from launch_train.trainer import train as loop

    values, real = dict(LOSSES), loop.evaluate

    def evaluate(run: Any, shutdown: Any) -> None:
        step = run.state["step"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_normalization, "global_mean", lambda *_: torch.tensor(values[step]))
            real(run, shutdown)

    monkeypatch.setattr(loop, "evaluate", evaluate)
    return values


def steps(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint."""
    names = manifests.manifest_names(LocalFolder(folder))
    return sorted(manifests.read(LocalFolder(folder), name).step for name in names)


def test_the_best_stay_beside_the_last(valley: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path / "run", **BEST)
    assert steps(tmp_path / "run") == [4, 8, 12]
    assert manifests.metrics(LocalFolder(tmp_path / "run"), "eval_loss") == {4: 1.0, 8: 1.5, 12: 5.0}
    assert find_checkpoint(LocalFolder(tmp_path / "run"), "best").step == 4
    assert checkpoint.load(str(tmp_path / "run"), 4)["loop"]["step"] == 4


def test_nothing_else_changes(valley: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path / "with", **BEST)
    train(tmp_path / "without", **CONFIG)
    assert steps(tmp_path / "without") == [12]
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert differences(tmp_path / "with", tmp_path / "without") == set()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [3, 4, 7, 9])
def test_a_resumed_run_keeps_the_same(valley: dict[int, float], tmp_path: Path, stopped: int) -> None:
    preempted(tmp_path / "run", stopped, **BEST)
    train(tmp_path / "run", generation=1, **BEST)
    assert steps(tmp_path / "run") == [4, 8, 12]


@pytest.fixture
def slow_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save takes longer than the steps to the next."""
    real = multipart_writer.write_shard

    def write_shard(*args: Any, **options: Any) -> Any:
        time.sleep(0.4)
        return real(*args, **options)

    monkeypatch.setattr("launch_train.checkpointing.async_saver.write_shard", write_shard)


@pytest.mark.usefixtures("slow_saves")
@pytest.mark.parametrize("stopped", [4, 9])
def test_an_exit_waits_for_the_best_that_is_being_saved(valley: dict[int, float], tmp_path: Path, stopped: int) -> None:
    preempted(tmp_path / "run", stopped, **BEST)
    assert max(manifests.metrics(LocalFolder(tmp_path / "run"), "eval_loss")) == stopped // 4 * 4
    train(tmp_path / "run", generation=1, **BEST)
    assert steps(tmp_path / "run") == [4, 8, 12]


@pytest.mark.usefixtures("slow_saves")
def test_a_cancelled_save_is_not_the_best(
    valley: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutdown, "SAVES_LEFT", 100)
    preempted(tmp_path / "run", 4, **BEST)
    assert steps(tmp_path / "run") == [2, 5]
    train(tmp_path / "run", generation=1, **{**BEST, "checkpoint": {"minutes": "off", "keep": {"last": 1, "best": 1}}})
    assert steps(tmp_path / "run") == [8, 12]


def test_each_save_of_an_interval_knows_its_loss(valley: dict[int, float], tmp_path: Path) -> None:
    """Saves that are always due: those of an evaluated step wait for the evaluation."""
    config = {**CONFIG, "checkpoint": {"minutes": 1e-6, "keep": {"last": 1, "best": 2}}}
    with waiting_for_saves():
        train(tmp_path / "run", **config)
    assert steps(tmp_path / "run") == [4, 8, 12]
    saved = [event["step"] for event in read(tmp_path / "run").events if event["event"] == "checkpoint"]
    assert {2, 4, 8} <= {*saved}
    assert len(saved) == len({*saved})
    assert any(step % 2 for step in saved)


def test_a_loss_that_is_no_number_is_never_the_best(valley: dict[int, float], tmp_path: Path) -> None:
    valley |= {2: float("nan"), 4: float("inf")}
    train(tmp_path / "run", **BEST)
    assert steps(tmp_path / "run") == [6, 8, 12]


def test_without_an_evaluated_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run", **{**CONFIG, "eval": {"every": 0}})
    with pytest.raises(CheckpointError, match="no checkpoint with an eval_loss"):
        find_checkpoint(LocalFolder(tmp_path / "run"), "best")


def test_the_loss_belongs_to_the_evaluated_step_alone(valley: dict[int, float], tmp_path: Path) -> None:
    preempted(tmp_path / "run", 4, **CONFIG)  # at step 5, whose newest loss is that of step 4
    assert manifests.metrics(LocalFolder(tmp_path / "run"), "eval_loss") == {}
    assert checkpoint.load(str(tmp_path / "run"))["loop"]["eval_loss"] == 1.0


def test_a_damaged_manifest_is_skipped(valley: dict[int, float], tmp_path: Path) -> None:
    train(tmp_path / "run", **BEST)
    (path,) = (tmp_path / "run" / "checkpoints" / "step-00000004").glob("*/manifest.json")
    path.write_text("{}")
    assert find_checkpoint(LocalFolder(tmp_path / "run"), "best").step == 8


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_agree(forked: Forked, tmp_path: Path, parallel: str) -> None:
    """And what they share out (FSDP) is exported whole; a run on one rank begins with it."""
    config = {**trials.CONFIG, **BEST, "parallel": parallel, "batch_size": 8}
    config["checkpoint"] = {"minutes": 1e-6, "keep": {"last": 1, "best": 2}}
    env = {contract.RUN_FOLDER: str(tmp_path / "run"), contract.CONFIG: json.dumps(config), "OMP_NUM_THREADS": "1"}
    done = forked(os.environ | env, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    found = manifests.metrics(LocalFolder(tmp_path / "run"), "eval_loss")
    evaluations = {event["step"]: event["loss"] for event in read(tmp_path / "run").events if event["event"] == "eval"}
    best = sorted(evaluations, key=lambda step: evaluations[step])[:2]
    assert steps(tmp_path / "run") == sorted({*best, 12})
    assert found == {step: evaluations[step] for step in {*best, 12}}
    storage = LocalFolder(tmp_path / "run")
    export(storage, find_checkpoint(storage), "torch", str(tmp_path / "out"))
    exported = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    saved = checkpoint.load(str(tmp_path / "run"))["model"]
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    env[contract.RUN_FOLDER] = str(tmp_path / "next")
    env[contract.CONFIG] = json.dumps({**config, "init_from": str(tmp_path / "run"), "steps": 1} | {"optimizer": TINY})
    done = forked(os.environ | env, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    begun = checkpoint.load(str(tmp_path / "next"))["model"]
    assert all(torch.allclose(begun[name], saved[name], atol=1e-6) for name in saved)


TINY = {"lr": 1e-9, "warmup_steps": 0}


@given(st.dictionaries(st.integers(1, 50), st.sampled_from([1.0, 2.0, 3.0]), max_size=9), st.integers(0, 5))
def test_the_best_steps(metrics: dict[int, float], count: int) -> None:
    found = retention.best_steps(metrics, count)
    assert len(found) == min(count, len(metrics))
    worst = max((metrics[step] for step in found), default=0.0)
    assert all(metrics[step] >= worst for step in metrics.keys() - {*found}) or not found


def test_an_evaluation_that_is_not_a_number_hides_no_best_step() -> None:
    metrics = {100: 2.0, 200: math.nan, 300: 1.5, 400: math.inf}
    assert retention.best_steps(metrics, 1) == [300]
    assert retention.best_steps(metrics, 3) == [300, 100]


def test_of_equal_evaluations_the_newest_is_the_best() -> None:
    assert retention.best_steps({100: 1.5, 200: 1.5, 300: 2.0, 400: 1.5}, 2) == [400, 200]


def test_they_are_kept_by_step() -> None:
    names = [runfolder.manifest(step, "0001-0000") for step in (1, 2, 3, 4)]
    doomed = retention.folders_to_remove(names, 4, "0001-0000", last=1, every=0, best=[2])
    assert doomed == [runfolder.checkpoint_folder(step, "0001-0000") for step in (1, 3)]


def test_the_setting() -> None:
    kept = parse({"checkpoint": {"keep": {"best": 2, "metric": "eval_loss"}}}).checkpoint
    assert (kept.keep_last, kept.keep_every, kept.keep_best, kept.keep_metric) == (3, 0, 2, "eval_loss")
    assert parse({"checkpoint": {"keep": 5}}).checkpoint.keep_last == 5
    assert parse({}).checkpoint.keep_best == 0
    for wrong in ({"best": -1}, {"best": 2, "metric": "loss"}, {"bets": 1}, "all", 0):
        assert problems({"checkpoint": {"keep": wrong}}), wrong
    (problem,) = problems({"checkpoint": {"keep": {"best": 1}}, "eval": {"every": 0}})
    assert problem[0] == ("checkpoint", "keep", "best")
