"""Benchmark complete training steps of real models: fp32, and the mixed precision that the trainer would choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import nn

from launch_train import models
from launch_train.bench import clock
from launch_train.bench.figures import BenchFigure
from launch_train.bench.matmul import tf32
from launch_train.common.config import Config, Gpt, ResNet
from launch_train.performance import precision

LARGE_GB: Final = 36.0
"""GPUs with at least this memory get larger batches: with small ones they wait for kernel launches."""


class Trial(NamedTuple):
    """A model and its batch size."""

    name: str
    shape: Gpt | ResNet
    batch: int

    @property
    def unit(self) -> str:
        return "tokens/s" if isinstance(self.shape, Gpt) else "images/s"


def trials(memory_gb: float | None, quick: bool) -> list[Trial]:
    """Return the trials for a GPU with that memory, or for a CPU (None). A quick run only has the GPT."""
    if memory_gb is None:
        both = [Trial("GPT", Gpt(), 12), Trial("ResNet-50", ResNet(image_size=64, width=16), 8)]
    else:
        large = memory_gb >= LARGE_GB
        gpt = Gpt(n_layer=6, n_head=12, n_embd=768, block_size=512, vocab_size=50304)
        both = [Trial("GPT", gpt, 32 if large else 4), Trial("ResNet-50", ResNet(), 128 if large else 32)]
    return both[:1] if quick else both


def measure(device: torch.device, budget: float, quick: bool) -> list[BenchFigure]:
    """Measure tokens or images per second in fp32 (without TF32) and in mixed precision, and the speed-up."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if device.type == "cuda" else None
    mixed, figures = numbers(capability), list[BenchFigure]()
    for trial in trials(memory, quick):
        slow, fast = (_rate(trial, policy, device, budget) for policy in (precision.POLICIES["fp32"], mixed))
        figures += [
            BenchFigure(f"{trial.name} fp32", slow, trial.unit),
            BenchFigure(f"{trial.name} {mixed.name}", fast, trial.unit),
            BenchFigure(f"{trial.name} {mixed.name}/fp32", fast / slow, "x"),
        ]
    return figures


def numbers(capability: tuple[int, int] | None) -> precision.PrecisionPolicy:
    """Return the mixed precision to compare with fp32.

    On a GPU that is the trainer's choice, or fp16 if it chooses no mixed precision; on a CPU (None) it is bf16.
    """
    if capability is None:
        return precision.POLICIES["bf16"]
    chosen = precision.choose("auto", "cuda", capability)
    return chosen if chosen.autocast else precision.POLICIES["fp16"]


def _rate(trial: Trial, used: precision.PrecisionPolicy, device: torch.device, budget: float) -> float:
    """Return tokens or images per second of steps with forward, backward and update."""
    per_sample = trial.shape.block_size if isinstance(trial.shape, Gpt) else 1
    with tf32(used.tf32):
        return trial.batch * per_sample / clock.seconds(_step(trial, used, device), device, budget)


def _step(trial: Trial, used: precision.PrecisionPolicy, device: torch.device) -> Callable[[], None]:
    """Return a function that runs one training step, always on the same batch."""
    model: nn.Module = models.build_model(Config(model=trial.shape)).to(device)
    shape = trial.shape
    if isinstance(shape, Gpt):
        inputs, targets = torch.randint(shape.vocab_size, (2, trial.batch, shape.block_size), device=device)
    else:
        inputs = torch.randn(trial.batch, 3, shape.image_size, shape.image_size, device=device)
        targets = torch.randint(shape.num_classes, (trial.batch,), device=device)
    if isinstance(shape, ResNet) and device.type == "cuda":  # in both trials, so that only the precision differs
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = precision.scaler(used, device)

    def step() -> None:
        with precision.autocast(used, device):
            loss = model(inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
