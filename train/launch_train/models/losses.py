"""Losses as modules of their own: where blocks are compiled one by one, so are they."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from launch_train.data.source import IGNORED


class CrossEntropy(nn.Module):
    """The mean cross-entropy in nats of logits [..., classes] under targets [...].

    It has no parameters, and a checkpoint doesn't know it. Over a vocabulary of 50 000 it reads and writes more than a
    block: op by op numbers as many are written four times in fp32; compiled in one piece, never.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class MaskedCrossEntropy(CrossEntropy):
    """The same over the targets that are not IGNORED; 0 where all are, of which the mean would be no number."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2), targets.flatten()
        total = functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)


def losses(model: nn.Module) -> list[nn.Module]:
    """Those of a model: what is worth being compiled beside its blocks."""
    return [module for module in model.modules() if isinstance(module, CrossEntropy)]
