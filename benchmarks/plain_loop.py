"""Baseline of `benchmarks.training`: a minimal handwritten training loop for a GPT.

It shares only the model class and the data order with the built-in trainer. Its losses are identical to the trainer's,
bit for bit (tests/train/trainer/test_plain_loop.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from launch_train.common.config import Gpt
from launch_train.data.sample_order import draw
from launch_train.models.gpt import GPT

SMALL = Gpt(n_layer=4, n_head=4, n_embd=128, block_size=64)


@dataclass(frozen=True)
class Job:
    """A training job; default: the small CPU GPT of nanoGPT's README. `text` is a file whose bytes are the tokens."""

    text: Path
    steps: int = 100
    shape: Gpt = SMALL
    batch_size: int = 12
    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 10
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    seed: int = 1337
    precision: str = "fp32"
    compile: bool = False


def train(job: Job, rank: int = 0, world: int = 1, each: Callable[[], None] = lambda: None) -> list[float]:
    """Train and return this rank's losses. Calls `each` before each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(job).to(device)
    optimizer = adamw(model, job)
    forward = wrapped(model, job, world)
    context = torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16")
    text, losses = training_part(job), []
    for step in range(1, job.steps + 1):
        each()
        for group in optimizer.param_groups:
            group["lr"] = rate(step, job)
        x, y = batch(text, step, job, rank, world)
        with context:
            loss = forward(there(x, device), there(y, device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def there(tokens: Tensor, device: torch.device) -> Tensor:
    """Move tokens to the device. On a GPU, uses pinned memory and an asynchronous copy, as nanoGPT's train.py does."""
    return tokens.contiguous().pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens


def build(job: Job) -> GPT:
    torch.manual_seed(job.seed)
    return GPT(job.shape)


def wrapped(model: nn.Module, job: Job, world: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Wrap the model in DDP if world > 1, and compile it if the job says so."""
    forward: nn.Module = DistributedDataParallel(model) if world > 1 else model
    return torch.compile(forward) if job.compile else forward


def adamw(model: nn.Module, job: Job) -> torch.optim.AdamW:
    """Return the optimizer; biases and norms have no weight decay."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": job.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.lr, betas=(0.9, 0.95), fused=True)


def rate(step: int, job: Job) -> float:
    """Return the learning rate: linear warm-up, then cosine decay."""
    if step <= job.warmup_steps:
        return job.lr * step / job.warmup_steps
    done = (step - job.warmup_steps) / (job.steps - job.warmup_steps)
    return job.min_lr + (job.lr - job.min_lr) * (1 + math.cos(math.pi * done)) / 2


def training_part(job: Job) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
    """Return the text without its last tenth."""
    size = job.text.stat().st_size
    return np.memmap(job.text, np.uint8, "r", shape=(size - size // 10,))


def batch(
    text: np.memmap[tuple[int], np.dtype[np.uint8]], step: int, job: Job, rank: int, world: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a step's batch: inputs and targets."""
    size, width = job.batch_size // world, job.shape.block_size
    starts = draw(job.seed, 0, step, job.batch_size, len(text) - width)[rank * size :][:size]
    rows = torch.from_numpy(text[starts[:, None] + np.arange(width + 1)].astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
