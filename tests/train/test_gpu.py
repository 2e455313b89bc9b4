"""What only an NVIDIA GPU shows: whole runs on it, in this process, with each kind of numbers, compiled or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch_train.bench import peaks
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import OutOfMemoryError, UsageError
from launch_train.distributed.process_group import Ranks
from launch_train.performance import micro_batch, precision
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run, setup
from tests.command import ROOT
from tests.train.trainer.test_train import events, read, steps

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # torch names kernels that aren't deterministic

GPT: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 128, "vocab_size": 512}
CONFIG: dict[str, Any] = {
    "model": GPT,
    "data": "synthetic",
    "steps": 30,
    "batch_size": 16,
    "micro_batch_size": 16,
    "compile": False,
    "eval": {"every": 0},
    "optimizer": {"lr": 1e-3, "warmup_steps": 5},
}
BERT: dict[str, Any] = {**GPT, "name": "bert"}
RESNET: dict[str, Any] = {"name": "resnet50", "width": 16, "image_size": 64, "num_classes": 4}


@pytest.fixture
def gpu() -> Iterator[Ranks]:
    """This process's GPU, with torch's settings put back behind the test."""
    torch.cuda.set_device(0)
    yield Ranks(device=torch.device("cuda", 0))
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    micro_batch.free_memory(torch.device("cuda", 0))
    if "_dynamo" in vars(torch):
        torch._dynamo.reset()


def train(gpu: Ranks, folder: Path, **config: Any) -> tuple[list[float], dict[str, Any]]:
    """The losses of a run, and its start event with the choices by name."""
    loop.train(parse({**CONFIG, **config}), gpu, {contract.RUN_FOLDER: str(folder)})
    rows = read(folder)
    (start,) = events(rows, "start")
    start["choices"] = {one["what"]: one["chosen"] for one in start["choices"]}
    return [row["loss"] for row in steps(rows)], start


def close(losses: list[float], others: list[float]) -> None:
    assert losses == pytest.approx(others, rel=0.03)
    assert losses[-1] < 0.9 * losses[0]


def test_each_kind_of_numbers_learns_alike(gpu: Ranks, tmp_path: Path) -> None:
    losses, start = train(gpu, tmp_path / "fp32", precision="fp32")
    assert (start["precision"], start["choices"]["optimizer"]) == ("fp32", "fused AdamW")
    close(losses, losses)
    for kind in ("tf32", "bf16") if torch.cuda.get_device_capability() >= (8, 0) else ():
        close(train(gpu, tmp_path / kind, precision=kind)[0], losses)


def test_each_kernel_for_attention_learns_alike(gpu: Ranks, tmp_path: Path) -> None:
    kinds = ("math", "efficient", *(("flash", "cudnn") if torch.cuda.get_device_capability() >= (8, 0) else ()))
    losses, _ = train(gpu, tmp_path / "auto")
    for kind in kinds:
        close(train(gpu, tmp_path / kind, attention=kind)[0], losses)
    with pytest.raises(UsageError, match=r"flash doesn't support this model's attention: .*dtype"):
        train(gpu, tmp_path / "wrong", attention="flash", precision="fp32")


def test_fp16_finds_its_scale(gpu: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a scale at which gradients overflow: those steps are left out, and no other."""
    high = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    monkeypatch.setattr(precision, "scaler", lambda *_: high)
    loop.train(parse({**CONFIG, "precision": "fp16"}), gpu, {contract.RUN_FOLDER: str(tmp_path)})
    rows = steps(read(tmp_path))
    skipped = [row["step"] for row in rows if "skipped" in row]
    assert skipped == list(range(1, len(skipped) + 1))
    assert 0 < len(skipped) < 10
    assert high.get_scale() == 2.0 ** (24 - len(skipped))
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "fp16"}, {"micro_batch_size": 4}, {"model": RESNET}, {"model": BERT, "micro_batch_size": 4}],
)
def test_no_step_waits_for_the_gpu(settings: dict[str, Any], gpu: Ranks) -> None:
    run = setup(parse({**CONFIG, **settings}), gpu, {})
    try:
        loop.train_step(run)  # the moments are made, and libraries opened
        loop.train_step(run)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            loop.train_step(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        _end(run)


def _end(run: Run) -> None:
    run.batch_loader.close()
    run.monitor.close()
    run.sink.close()


@pytest.mark.parametrize("model", [GPT, RESNET])
def test_compiled_or_not_it_learns_alike(model: dict[str, Any], gpu: Ranks, tmp_path: Path) -> None:
    """The blocks of the one, all of the other: batch norm over few samples makes much of a last bit."""
    losses, _ = train(gpu, tmp_path / "eager", model=model)
    compiled, start = train(gpu, tmp_path / "compiled", model=model, compile=True)
    assert start["choices"]["compile"] == ("whole" if model is RESNET else "regional")
    same, apart = (1, 0.2) if model is RESNET else (5, 0.03)
    assert compiled[:same] == pytest.approx(losses[:same], rel=apart)
    assert compiled[-1] < losses[0]


def test_cuda_graphs_learn_alike(gpu: Ranks, tmp_path: Path) -> None:
    losses, _ = train(gpu, tmp_path / "eager")
    graphed, start = train(gpu, tmp_path / "graphs", compile=True, cuda_graphs=True)
    assert (start["choices"]["compile"], start["choices"]["cuda graphs"]) == ("whole", "true")
    close(graphed, losses)


def test_pixels_together_learn_alike(gpu: Ranks, tmp_path: Path) -> None:
    apart, _ = train(gpu, tmp_path / "apart", model=RESNET, channels_last=False)
    together, start = train(gpu, tmp_path / "together", model=RESNET)
    assert start["choices"]["channels last"] == ("false" if start["precision"] == "fp32" else "true")
    assert together[0] == pytest.approx(apart[0], rel=0.2)
    assert together[-1] < apart[0]


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_blocks_that_keep_less_take_less_memory(kind: str, gpu: Ranks, tmp_path: Path) -> None:
    wide = {**GPT, "n_layer": 12, "block_size": 512}
    peaks, losses = list[float](), list[list[float]]()
    for asked in ("none", kind):
        micro_batch.free_memory(gpu.device)
        torch.cuda.reset_peak_memory_stats()
        losses.append(train(gpu, tmp_path / asked, model=wide, activation_checkpointing=asked, steps=3)[0])
        peaks.append(torch.cuda.max_memory_allocated())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert peaks[1] < 0.9 * peaks[0]


def test_mfu_is_a_part_of_the_peak(gpu: Ranks, tmp_path: Path) -> None:
    """Where the card is known."""
    wide = {**GPT, "n_layer": 8, "n_embd": 1024, "n_head": 16, "block_size": 512}
    _, start = train(gpu, tmp_path, model=wide, micro_batch_size=16, steps=10)
    known = bool(peaks.tflops(start["device"]).get(start["precision"]))
    shares = [row.get("mfu") for row in steps(read(tmp_path))]
    assert all(0.01 < share < 1 for share in shares[5:] if share) if known else not any(shares)
    assert all(shares) is known


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_learn_as_one_does(gpu: Ranks, tmp_path: Path) -> None:
    losses, _ = train(gpu, tmp_path / "one")
    config = json.dumps({**CONFIG, "micro_batch_size": 8})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    torchrun += ["--nproc-per-node=2", "-m", "launch_train"]
    env = os.environ | {contract.CONFIG: config, contract.RUN_FOLDER: str(tmp_path / "two")}
    env["PYTHONPATH"] = str(ROOT / "train")
    subprocess.run(torchrun, env=env, check=True, timeout=300)
    rows = read(tmp_path / "two")
    assert [(start["backend"], start["world_size"]) for start in events(rows, "start")] == [("nccl", 2)]
    close([row["loss"] for row in steps(rows)], losses)


# --- Memory that is really full ---------------------------------------------------------------------------------------


def test_the_largest_micro_batch_that_fits(gpu: Ranks, tmp_path: Path) -> None:
    """In the first GB of the card: 4096 samples at a time don't fit, fewer do, and the run goes well with them."""
    with only(gpu, 1e9):
        losses, start = train(gpu, tmp_path, batch_size=4096, micro_batch_size="auto", steps=2)
        assert 1 <= int(start["choices"]["micro-batch"]) < 4096
        assert len(losses) == 2
        (row, _) = steps(read(tmp_path))
        assert 0.1 < row["memory_gb"] < 1.0


def test_less_at_a_time_where_the_memory_runs_out_later(
    gpu: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 4 on there is room for three quarters of what a micro-batch took."""
    plain, _ = train(gpu, tmp_path / "plain", steps=6)
    real, taken = loop.train_step, list[torch.Tensor]()

    def step(run: Run) -> None:
        if run.state["step"] == 3:
            pass_takes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
            micro_batch.free_memory(gpu.device)
            left = int(1e9) - torch.cuda.memory_reserved() - pass_takes * 3 // 4
            taken.append(torch.empty(left, dtype=torch.uint8, device=gpu.device))
        real(run)

    monkeypatch.setattr(loop, "train_step", step)
    with only(gpu, 1e9):
        torch.cuda.reset_peak_memory_stats()
        losses, _ = train(gpu, tmp_path / "full", steps=6)
    taken.clear()
    rows = read(tmp_path / "full")
    assert [event["step"] for event in events(rows, "out_of_memory")] == [4]
    assert [row.get("micro_batch", 16) < 16 for row in steps(rows)] == [False] * 3 + [True] * 3
    assert losses == pytest.approx(plain, rel=0.03)


def test_a_model_that_does_not_fit_at_all(gpu: Ranks, tmp_path: Path) -> None:
    with only(gpu, 2e8), pytest.raises(OutOfMemoryError, match=r"not even one sample fits|is out of memory"):
        train(gpu, tmp_path, model={**GPT, "n_embd": 1024, "n_layer": 8}, micro_batch_size="auto")


class only:  # noqa: N801 - read as a word
    """Inside, this process may take so many bytes of the GPU and no more."""

    def __init__(self, gpu: Ranks, size: float) -> None:
        self.device, self.size = gpu.device, size

    def __enter__(self) -> None:
        micro_batch.free_memory(self.device)
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(self.size / total, self.device)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
