"""The training loop, in this process and on one rank; test_determinism.py starts several."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train import checkpoint
from launch_train.checkpointing import manifest as manifests
from launch_train.common import console, contract
from launch_train.common.config import parse
from launch_train.common.errors import OutputError, UsageError
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.models import build_model
from launch_train.performance.micro_batch import split_evenly
from launch_train.telemetry import metric_sink
from launch_train.trainer import shutdown, train
from launch_train.trainer.build import Run
from launch_train.trainer.metrics_buffer import Recorder, first_and_last_means
from launch_train.trainer.replica_check import find_disagreement, parameters_sha256

TINY: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32},
    "steps": 30,
    "batch_size": 8,
    "optimizer": {"lr": 1e-2},
    "eval": {"every": 20, "batches": 2},
    "log_every": 4,
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 200)
    return path


def run(folder: Path, config: Mapping[str, Any], **env: str) -> list[dict[str, Any]]:
    """Train, and return what the run folder then says."""
    train.train(parse({**TINY, **config}), Ranks(), {contract.RUN_FOLDER: str(folder), **env})
    return read(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    storage = LocalFolder(folder)
    return [json.loads(line) for name in storage.list("metrics/") for line in storage.read(name).splitlines()]


def steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "event" not in row]


def events(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("event") == name]


def test_a_run_from_start_to_end(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    rows = run(folder, {"data": str(text)})
    (start,), (end,), (saved,) = events(rows, "start"), events(rows, "end"), events(rows, "checkpoint")

    assert [row["step"] for row in steps(rows)] == list(range(1, 31))
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_s", "step_s", "data_s", "memory_gb", "time"}
    assert all(set(row) == keys for row in steps(rows))
    assert [row["step"] for row in events(rows, "eval")] == [20, 30]
    assert start["config"]["batch_size"] == 8
    assert (start["data_bytes"], start["world_size"], start["precision"]) == (9000, 1, "fp32")

    losses = [row["loss"] for row in steps(rows)]
    assert end["train_loss_first"] == pytest.approx(sum(losses[:10]) / 10)
    assert end["train_loss_last"] == pytest.approx(sum(losses[-10:]) / 10)
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert end["eval_loss"] < end["unigram_entropy"] < end["train_loss_first"]
    assert end["eval_loss"] == events(rows, "eval")[-1]["loss"]

    state = checkpoint.load(str(folder), 30)
    manifest = manifests.read(LocalFolder(folder), f"{saved['path']}/manifest.json")
    model = build_model(parse(TINY))
    model.load_state_dict(state["model"])
    assert parameters_sha256(model, Ranks()) == end["parameters_sha256"] == manifest.about["parameters_sha256"]
    assert (state["loop"]["step"], saved["path"]) == (30, "checkpoints/step-00000030/0001-0001")
    assert list((folder / "logs").iterdir())

    out = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 30/30  loss ") for line in out)
    assert any(line.startswith("  held out") for line in out)
    assert any("is the unigram entropy" in line for line in out)
    assert max(map(len, out)) <= 60 + len(str(folder))


def test_the_first_step_of_a_start_is_written_at_once_with_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sink, "FLUSH_SECONDS", 60.0)
    run(tmp_path, {"data": "synthetic", "steps": 9, "eval": {"every": 0}})
    first, *_ = sorted((tmp_path / "metrics").iterdir())
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    assert [row.get("event", row.get("step")) for row in rows] == ["start", 1]


def test_accumulation_changes_nothing_but_the_rounding(tmp_path: Path, text: Path) -> None:
    whole, parts = (
        run(tmp_path / name, {"data": str(text), "steps": 10, "micro_batch_size": size})
        for name, size in (("whole", "auto"), ("parts", 2))
    )
    for one, other in zip(steps(whole), steps(parts), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_the_ranks_exchange_gradients_once_a_step(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextmanager
    def no_sync(now: Run) -> Iterator[None]:
        entered.append(now.state["step"])
        yield

    monkeypatch.setattr(Run, "no_sync", no_sync)
    run(tmp_path / "run", {"data": str(text), "steps": 2, "micro_batch_size": 2})
    assert entered == [0, 0, 0, 1, 1, 1], "of the four micro-batches of a step all but the last"


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path: Path, text: Path) -> None:
    runs = [
        run(tmp_path / name, {"data": str(text), "steps": 5, "seed": seed, "model": {**TINY["model"], "dropout": 0.1}})
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    a, b, c = ([row["loss"] for row in steps(rows)] for rows in runs)
    assert a == b
    assert a != c
    digests = [events(rows, "end")[0]["parameters_sha256"] for rows in runs]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("grad_clip", [0, 1e-9])
def test_clipping(tmp_path: Path, text: Path, grad_clip: float) -> None:
    """0 is off. With SGD a norm clipped to almost nothing leaves the parameters as they were."""
    sgd = {"name": "sgd", "lr": 0.3, "min_lr": 0.3, "momentum": 0, "weight_decay": 0, "grad_clip": grad_clip}
    rows = steps(run(tmp_path / "run", {"data": str(text), "steps": 20, "optimizer": sgd, "eval": {"every": 0}}))
    assert all(row["grad_norm"] > 0.1 for row in rows)
    assert (rows[-1]["loss"] < rows[0]["loss"] - 0.3) == (grad_clip == 0)


@pytest.mark.slow
def test_resnet_learns_synthetic_images(tmp_path: Path) -> None:
    model = {"name": "resnet50", "width": 8, "image_size": 32, "num_classes": 4}
    rows = run(tmp_path / "run", {"model": model, "steps": 40, "batch_size": 32, "optimizer": {"lr": 1e-2}})
    (end,) = events(rows, "end")
    assert end["train_loss_last"] < end["train_loss_first"] - 0.2
    assert end["images_per_s"] > 0
    assert "tokens_per_s" not in end
    assert end["unigram_entropy"] is None
    assert end["eval_accuracy"] > 0.5
    assert end["eval_accuracy_top5"] == 1, "there are four classes"
    evaluation = events(rows, "eval")[-1]
    assert (evaluation["accuracy"], evaluation["accuracy_top5"]) == (end["eval_accuracy"], 1)


def test_bf16_on_the_cpu_and_synthetic_tokens(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", {"data": "synthetic", "precision": "bf16", "eval": {"every": 0}, "loggers": []})
    (end,) = events(rows, "end")
    assert end["precision"] == "bf16"
    assert end["train_loss_last"] < end["train_loss_first"]
    assert end["eval_loss"] is None
    assert events(rows, "eval") == []
    assert not (tmp_path / "run" / "logs").exists()


def test_rows_are_complete_after_an_error(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = train.optimizer_step

    def breaks(setup: Any) -> Any:
        if setup.state["step"] == 6:
            raise RuntimeError("the GPU has left")
        return update(setup)

    monkeypatch.setattr(train, "optimizer_step", breaks)
    with pytest.raises(RuntimeError, match="has left"):
        run(tmp_path / "run", {"data": str(text)})
    assert [row["step"] for row in steps(read(tmp_path / "run"))] == [1, 2, 3, 4, 5, 6]
    assert events(read(tmp_path / "run"), "end") == []


def test_a_device_that_never_answers_does_not_hold_the_error_back(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for_ever = threading.Event()
    monkeypatch.setattr(shutdown, "ROWS_SECONDS", 0.1)
    monkeypatch.setattr(Recorder, "take_block", lambda self, alone=False: (for_ever.wait(30), [])[1])
    monkeypatch.setattr(train, "optimizer_step", lambda run: 1 / 0)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", {"data": str(text)})
    for_ever.set()
    assert time.monotonic() - began < 10


def test_a_peers_failure_ends_the_run_at_a_step_with_all_rows(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, before = train.optimizer_step, signal.getsignal(signal.SIGTERM)

    def told(setup: Any) -> Any:
        if setup.state["step"] == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(setup)

    monkeypatch.setattr(train, "optimizer_step", told)
    config = {"data": str(text), "log_every": 100, "eval": {"every": 0}}
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", config, LAUNCH_NOTICE=str(tmp_path / "never"))
    assert stopped.value.code == 143
    assert [row["step"] for row in steps(read(tmp_path / "run"))] == [1, 2, 3, 4, 5, 6, 7]
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_fails_after_sigterm_is_the_stop(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks were told too: one that has gone already makes this one's collective fail."""

    def breaks(setup: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(train, "optimizer_step", breaks)
    with pytest.raises(SystemExit):
        run(tmp_path / "run", {"data": str(text)})


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train.train(parse({**TINY, "data": str(text), "steps": 2, "checkpoint": {"minutes": 5}}), Ranks(), {})
    assert "LAUNCH_RUN_FOLDER is not set" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_an_output_that_can_not_be_written_ends_the_run(tmp_path: Path, text: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics").write_bytes(b"in the way")
    with pytest.raises(OutputError, match="can't be written"):
        run(tmp_path / "run", {"data": str(text), "steps": 2})


# --- Parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "world", "size"), [(24, None, 1, 24), (24, None, 2, 12), (24, 4, 2, 4), (24, 1, 24, 1)]
)
def test_the_micro_batch(batch: int, micro: int | None, world: int, size: int) -> None:
    assert split_evenly(batch, micro, world).size == size


def test_a_batch_that_is_smaller_than_the_number_of_ranks() -> None:
    with pytest.raises(UsageError, match="batch_size 1 is not a multiple of 8 processes; use for example 8"):
        split_evenly(1, None, 8)


def test_disagreement_names_the_ranks() -> None:
    assert find_disagreement(["a" * 64] * 4) is None
    words = find_disagreement(["a" * 64, "b" * 64, "a" * 64])
    assert words is not None
    assert "ranks 0, 2: aaaa" in words
    assert "ranks 1: bbbb" in words


def test_the_digest_sees_every_bit_and_every_name() -> None:
    def digest(name: str = "a", value: float = 1.0, shape: tuple[int, ...] = (4,), dtype: Any = torch.float32) -> str:
        parameter = torch.nn.Parameter(torch.full(shape, value, dtype=dtype))
        return parameters_sha256(torch.nn.ParameterDict({name: parameter}), Ranks())

    assert digest() == digest()
    zero = digest(value=0.0)
    assert digest() not in {digest(name="b"), digest(value=1.0000001), digest(shape=(2, 2)), zero}
    norms = [torch.nn.BatchNorm1d(2) for _ in range(2)]
    norms[1].register_buffer("running_mean", torch.full((2,), 1e-6))
    assert parameters_sha256(norms[0], Ranks()) != parameters_sha256(norms[1], Ranks())
    assert digest(value=0.0, dtype=torch.bfloat16, shape=(8,)) != digest(value=0.0, dtype=torch.float16, shape=(8,))


def test_the_progress_line() -> None:
    row = {"step": 120, "loss": 2.43117, "lr": 9.1e-4, "tokens_per_s": 12345.0}
    line = console.step_line(row, 300, "tokens", 41.2)
    assert line == "step 120/300  loss 2.4312  lr 9.1e-04  12.3k tokens/s  ETA 0:41"
    assert console.step_line({**row, "step": 7}, 1000, "tokens", 0).startswith("step    7/1000  ")
    assert "loss nan" in console.step_line({**row, "loss": float("nan")}, 300, "tokens", 0)


@pytest.mark.parametrize(("done", "window"), [(1, 1), (10, 10), (11, 5), (12, 6), (19, 9), (20, 10), (300, 10)])
def test_the_first_and_the_last_steps_do_not_overlap(done: int, window: int) -> None:
    first, last, steps = first_and_last_means(list(range(done))[:10], list(range(done))[-10:], done)
    assert steps == window
    assert (first, last) == ((window - 1) / 2, done - (window + 1) / 2)


def test_a_short_run_has_one_mean_loss_and_launch_tells_its_own() -> None:
    end = {"step": 10, "seconds": 3.0, "world_size": 2, "device": "cpu", "precision": "fp32", "tokens_per_s": 5847.0}
    end |= {"train_loss_first": 4.5, "train_loss_last": 4.5, "parameters": 828544, "parameters_sha256": "ab" * 32}
    assert "loss        4.5000 (mean of all steps)\n" in console.end_table(end, "tokens", None, {})
    longer = console.end_table(end | {"step": 11, "train_loss_last": 2.0, "train_loss_steps": 5}, "tokens", None, {})
    assert "loss        4.5000 -> 2.0000 (means of 5 steps)\n" in longer
    assert [
        line.split()[0] for line in console.end_table(end, "tokens", "/r", {"LAUNCH_RUN": "a"}).split("\n") if line
    ] == [
        "steps",
        "model",
        "sha256",
    ]
