"""The optimizer, its parameter groups, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from train.config import Optimizer


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """The rate of a step from 1 to `steps`: up in a line to `lr` at the end of the warm-up, then down along half a
    cosine to `min_lr` at the last step."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / (steps - settings.warmup_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


def build(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD in its fused form, which torch 2.13 has for CPU and CUDA."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay for matrices and kernels only, not for biases and norms (fewer than two dimensions)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
