"""Memory layout of tensors: channels-last images, vocabulary sizes that fill whole tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.config import Config
from launch_train.common.decisions import Choice
from launch_train.data.batch import map_tensors

TILE = 64
"""GPU matrix products are fastest if both sides are multiples of this: 128 bytes of 16-bit numbers, as NVIDIA's matrix
multiplication guide recommends for an A100. For this nanoGPT pads GPT-2's 50257 tokens to 50304."""


WHY_NOT = "worthwhile on a GPU in 16 bits only"
"""Reason for keeping the layout of images."""


def vocabulary_choice(config: Config, device: torch.device) -> Choice | None:
    """Suggest a padded vocabulary on a GPU; None if the size fits or the model has no vocabulary."""
    size = getattr(config.model, "vocab_size", None)
    if size is None or size % TILE == 0 or device.type != "cuda":
        return None
    return Choice("vocabulary", str(size), f"{-(-size // TILE) * TILE} would be faster (a multiple of {TILE})")


def use_channels_last(model: nn.Module, config: Config, device: torch.device, *, half_precision: bool) -> Choice | None:
    """Convert the model and its future inputs to channels-last layout, if the spec sets it or it is faster.

    It is faster for convolutions on a GPU in 16 bits (`half_precision`). Parameters stay the same objects. Returns None
    if the model has no convolutions and the spec doesn't set it.
    """
    configured, faster = config.channels_last, device.type == "cuda" and half_precision
    if configured is None and not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return None
    enabled = faster if configured is None else configured
    if enabled:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stub
        model.register_forward_pre_hook(_to_channels_last)
    why = "set in the spec" if configured is not None else "convolutions in 16 bits" if faster else WHY_NOT
    return Choice("channels last", str(enabled).lower(), why)


def _to_channels_last(_model: nn.Module, args: tuple[Any, ...]) -> Any:
    """Convert the floating-point tensors with four dimensions, which are taken for images."""
    return map_tensors(
        args,
        lambda tensor: (
            tensor.contiguous(memory_format=torch.channels_last)
            if tensor.dim() == 4 and tensor.is_floating_point()
            else tensor
        ),
    )


def match_parameter_layout(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer's moments the memory layout of their parameters: a fused step needs it, and a checkpoint stores
    shapes only."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
