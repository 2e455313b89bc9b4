"""The optimizer, its parameter groups, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.config import Optimizer
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.distributed.dtensor import is_sharded, local_part
from launch_train.performance import eager


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """The rate of a step from 1 to `steps`: up in a line to `lr` at the end of the warm-up, then down along half a
    cosine to `min_lr` at the last step."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / (steps - settings.warmup_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


def build(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD in its fused form, which torch 2.13 has for floating-point parameters on all devices that we train
    on; else in its foreach form. Either can be told to skip a step (launch_train.performance.grad_guard). Raises
    UsageError: it is to be fused and can't be."""
    groups, against = parameter_groups(model, settings.weight_decay), unfused(model, settings.name)
    if settings.fused and against:
        raise UsageError(f"optimizer.fused: true can't be had: {against}")
    fused = not against if settings.fused is None else settings.fused
    how: dict[str, Any] = {"lr": settings.lr, "fused": fused, "foreach": None if fused else True}
    if settings.name == "sgd":
        built: torch.optim.Optimizer = eager.optimizer(torch.optim.SGD)(groups, momentum=settings.momentum, **how)
        _begin_with_zeros(built)
    else:
        built = eager.optimizer(torch.optim.AdamW)(groups, betas=settings.betas, **how)
    if not fused:
        _skip_by_copies(built)
    return built


def _begin_with_zeros(optimizer: torch.optim.Optimizer) -> None:
    """SGD's momentum: the same bits as without, but the fused form, if its first step is skipped, would go on with
    memory that nothing was written to (torch 2.13)."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def unfused(model: nn.Module, name: str = "adamw") -> str:
    """Why this model's optimizer has no fused form, empty if it has one: no SGD for parameters that are shared out
    among the ranks (torch 2.13's DTensor doesn't know that operator), and none at all for complex numbers."""
    if name == "sgd" and any(map(is_sharded, model.parameters())):
        return "parallel: fsdp has no fused SGD"
    trained = [p for p in model.parameters() if p.requires_grad]
    if not all(p.is_floating_point() for p in trained):
        return "complex numbers have no fused form"
    devices = {p.device.type for p in trained} - FUSED
    return f"{devices.pop()} has no fused {name}" if devices else ""


FUSED = frozenset({"cpu", "cuda", "mps"})
"""Devices with fused kernels for AdamW and SGD (torch.utils._foreach_utils)."""


def moments(settings: Optimizer) -> int:
    """Numbers that it keeps for each parameter."""
    return 2 if settings.name == "adamw" else int(settings.momentum > 0)


def held(optimizer: torch.optim.Optimizer, settings: Optimizer) -> int:
    """Numbers for each parameter that it holds beside the model at the most: its moments; where it isn't fused, in a
    step also copies of them and of the parameter, and one more for what foreach computes."""
    kept = moments(settings)
    return kept if optimizer.defaults["fused"] else 2 * kept + 2


def explained(optimizer: torch.optim.Optimizer, asked: bool | None, model: nn.Module) -> Choice:
    """Which form it has, and why."""
    fused = optimizer.defaults.get("fused")
    found = "few kernels for all parameters" if fused else unfused(model, type(optimizer).__name__.lower())
    why = found if asked is None else "the spec says so"
    return Choice("optimizer", f"{'fused' if fused else 'foreach'} {type(optimizer).__name__}", why)


def _skip_by_copies(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that isn't fused heed `found_inf` too, on the device: if it is set, what the step has changed is
    put back. The copies take as much memory as parameters and moments."""
    before: dict[Tensor, dict[str, Tensor]] = {}
    flag: list[Tensor] = []

    def remember(*_: Any) -> None:
        flag[:] = [optimizer.__dict__.pop("found_inf")] if "found_inf" in optimizer.__dict__ else []
        before.update({p: {name: t.detach().clone() for name, t in tensors.items()} for p, tensors in _of(optimizer)})

    @torch.no_grad()
    def put_back(*_: Any) -> None:
        for parameter, tensors in _of(optimizer) if flag else ():
            for name, now in tensors.items():  # a moment that wasn't there began as zeros
                was = before[parameter].get(name, torch.zeros_like(now))
                now.copy_(torch.where(flag[0].to(now.device).bool(), was, now))
        before.clear()
        if flag:  # which a gradient scaler removes by itself
            optimizer.found_inf = flag[0]  # type: ignore[attr-defined]  # torch.amp.GradScaler sets it too

    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # else a scaler asks the device
    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(put_back)


def _of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Each parameter with what a step changes: itself, and its state; of what is shared out, the part that is here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            yield parameter, {name: local_part(value) for name, value in {"": parameter, **state}.items()}


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
