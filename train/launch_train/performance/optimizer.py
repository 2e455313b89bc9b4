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
    """Return the rate of a step from 1 to `steps`: linear warm-up to `lr`, then cosine decay to `min_lr`."""
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    progress = (step - settings.warmup_steps) / (steps - settings.warmup_steps)
    return settings.min_lr + (settings.lr - settings.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Build AdamW or SGD, fused if available, else foreach. Both can skip a step (see grad_guard).

    torch 2.13 has fused forms for floating-point parameters on all devices that we train on. Raises UsageError if the
    spec sets `fused: true` and there is none.
    """
    groups, not_fused = parameter_groups(model, settings.weight_decay), reason_not_fused(model, settings.name)
    if settings.fused and not_fused:
        raise UsageError(f"optimizer.fused: true is not available: {not_fused}; remove the setting")
    fused = not not_fused if settings.fused is None else settings.fused
    options: dict[str, Any] = {"lr": settings.lr, "fused": fused, "foreach": None if fused else True}
    if settings.name == "sgd":
        sgd = eager.eager_optimizer(torch.optim.SGD)
        built: torch.optim.Optimizer = sgd(groups, momentum=settings.momentum, **options)
        # Fused SGD would use uninitialized memory if its first step is skipped (torch 2.13). The bits are the same.
        for group in built.param_groups if settings.momentum else ():
            for parameter in group["params"]:
                built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    else:
        built = eager.eager_optimizer(torch.optim.AdamW)(groups, betas=settings.betas, **options)
    if not fused:
        _support_skipping(built)
    return built


def reason_not_fused(model: nn.Module, name: str = "adamw") -> str:
    """Return why this model's optimizer has no fused form; empty if it has one.

    torch 2.13 has no fused SGD for sharded parameters (DTensor), and nothing fused for complex numbers.
    """
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
    """Return the number of values that the optimizer keeps per parameter."""
    return 2 if settings.name == "adamw" else int(settings.momentum > 0)


def numbers_per_parameter(optimizer: torch.optim.Optimizer, settings: Optimizer) -> int:
    """Return the most numbers per parameter that the optimizer holds besides the model.

    These are its moments. If it isn't fused, a step also holds a copy of each moment and of the parameter, and one
    intermediate result of foreach.
    """
    kept = moments(settings)
    return kept if optimizer.defaults["fused"] else 2 * kept + 2


def choice(optimizer: torch.optim.Optimizer, configured: bool | None, model: nn.Module) -> Choice:
    fused = optimizer.defaults.get("fused")
    reason = "few kernels for all parameters" if fused else reason_not_fused(model, type(optimizer).__name__.lower())
    why = reason if configured is None else "set in the spec"
    return Choice("optimizer", f"{'fused' if fused else 'foreach'} {type(optimizer).__name__}", why)


def _support_skipping(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that isn't fused obey `found_inf` on the device: if it is set, undo the step.

    The copies take as much memory as parameters and moments.
    """
    before: dict[Tensor, dict[str, Tensor]] = {}
    flag: list[Tensor] = []

    def copy_state(*_: Any) -> None:
        flag[:] = [optimizer.__dict__.pop("found_inf")] if "found_inf" in optimizer.__dict__ else []
        for parameter, tensors in _step_tensors(optimizer):
            before[parameter] = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def restore_if_flagged(*_: Any) -> None:
        for parameter, tensors in _step_tensors(optimizer) if flag else ():
            for name, now in tensors.items():  # a moment that the step created started from zeros
                was = before[parameter].get(name, torch.zeros_like(now))
                now.copy_(torch.where(flag[0].to(now.device).bool(), was, now))
        before.clear()
        if flag:  # GradScaler deletes it after the step
            optimizer.found_inf = flag[0]  # type: ignore[attr-defined]  # torch.amp.GradScaler sets it too

    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # else GradScaler syncs with the device
    optimizer.register_step_pre_hook(copy_state)
    optimizer.register_step_post_hook(restore_if_flagged)


def _step_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter with the tensors that a step changes: itself ("") and its state; this rank's shards."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = {name: value for name, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
            yield parameter, {name: local_part(value) for name, value in {"": parameter, **state}.items()}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return parameter groups that apply weight decay to matrices and kernels only, not to biases and norms (fewer than
    two dimensions)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
