"""How tensors lie in memory: images by pixel instead of by channel, vocabularies in whole tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.config import Config
from launch_train.common.decisions import Choice
from launch_train.data.batch import mapped

TILE = 64
"""Matrix products on GPUs are fastest where both sides are multiples of it: 128 bytes of 16-bit numbers, which is what
NVIDIA's guide to matrix multiplication asks of an A100, and why nanoGPT pads GPT-2's 50257 tokens to 50304."""


ELSEWHERE = "it pays on a GPU, in 16 bits"
"""Why images lie as they came."""


def padded(size: int) -> int:
    """The next multiple of TILE."""
    return -(-size // TILE) * TILE


def vocabulary(config: Config, device: torch.device) -> Choice | None:
    """What to say about the model's vocabulary: nothing where it lies well, or where there is none."""
    size = getattr(config.model, "vocab_size", None)
    if size is None or size % TILE == 0 or device.type != "cuda":
        return None
    return Choice("vocabulary", str(size), f"{padded(size)} is faster, whole tiles of {TILE}")


def channels_last(model: nn.Module, config: Config, device: torch.device, *, halved: bool) -> Choice | None:
    """Put the model, and from now on the images that it is given, into channels-last order if that pays: convolutions
    on a GPU in 16-bit numbers (`halved`). Parameters stay the same objects. None: there is nothing to decide."""
    asked, here = config.channels_last, device.type == "cuda" and halved
    if asked is None and not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return None
    if asked or (asked is None and here):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub leaves it out
        model.register_forward_pre_hook(_by_pixel)
    why = "the spec says so" if asked is not None else "convolutions in 16 bits" if here else ELSEWHERE
    return Choice("channels last", str(here if asked is None else asked).lower(), why)


def _by_pixel(_model: nn.Module, args: tuple[Any, ...]) -> Any:
    return mapped(args, _image_by_pixel)


def _image_by_pixel(tensor: Tensor) -> Tensor:
    """Four dimensions of floating-point numbers are taken for images."""
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Lay an optimizer's moments out as their parameters: a fused step reads both in the order of memory, and a
    checkpoint knows shapes only."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
