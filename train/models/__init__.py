"""The models that the trainer can build."""

from __future__ import annotations

from torch import nn

from train.config import Gpt, ResNet
from train.models.gpt import GPT, flops_per_token
from train.models.resnet import resnet50

__all__ = ["build", "flops_per_sample"]


def build(shape: Gpt | ResNet) -> nn.Module:
    """A freshly initialised model on the CPU; `torch.manual_seed` decides its parameters.

    `model(inputs, targets)` is the mean loss: cross-entropy in nats.
    """
    return GPT(shape) if isinstance(shape, Gpt) else resnet50(shape)


def flops_per_sample(shape: Gpt | ResNet, model: nn.Module) -> float | None:
    """Floating-point operations of forward and backward for one sample; None where no formula is at hand."""
    return flops_per_token(shape, model) * shape.block_size if isinstance(shape, Gpt) else None
