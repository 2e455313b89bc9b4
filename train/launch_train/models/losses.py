"""Losses as modules, so that they can be compiled separately, like blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from launch_train.data.source import IGNORED


class CrossEntropy(nn.Module):
    """Mean cross-entropy in nats of logits [..., classes] and targets [...].

    Has no parameters, so it isn't in checkpoints. Over a vocabulary of 50 000 it moves more memory than a block: eager
    code writes arrays of the logits' size four times in fp32, compiled code never.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class MaskedCrossEntropy(CrossEntropy):
    """Mean cross-entropy over the targets that are not IGNORED; 0 (not NaN) if all are."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2), targets.flatten()
        total = functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)


def losses(model: nn.Module) -> list[nn.Module]:
    """Return the model's loss modules, which are worth compiling besides its blocks."""
    return [module for module in model.modules() if isinstance(module, CrossEntropy)]
