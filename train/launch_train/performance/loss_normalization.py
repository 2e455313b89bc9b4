"""Losses with ignored targets: every counted target has the same weight in the step, however the global batch is split
into micro-batches and among the ranks.

A mean of means would be wrong, as micro-batches have different counts. So each pass contributes its sum, divided by its
number of targets (a constant, which keeps the gradients in the range of half precision), and the counted share of
them. Both add up over micro-batches and ranks; their quotient is the mean over all counted targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from launch_train.common.config import Config, ExternalModel
from launch_train.data.batch import count_samples
from launch_train.data.source import IGNORED, Batch, Source
from launch_train.distributed.dtensor import local_part
from launch_train.distributed.process_group import Ranks, mean


def countable_targets(config: Config, source: Source) -> int:
    """Return the targets of one sample if they may have different weights: some are IGNORED, or a custom loss counts
    them. 0: all have the same weight, so a mean of means is right."""
    custom = config.loss is not None or (
        isinstance(config.model, ExternalModel) and not config.model.name.startswith("hf:")
    )
    return source.targets or (source.per_sample if custom else 0)


def loss_of(forward: Callable[..., Any], batch: Batch, targets: int) -> Tensor:
    """Return the mean loss of a micro-batch [], or, if targets may have different weights, [2]: the sum over the
    counted ones and their number, both divided by the number of all. No value is read, so the host does not wait
    for the GPU.

    `forward` returns the mean over the targets that are not IGNORED, or a pair of their sum and their count.
    """
    loss = forward(*batch)
    if not targets:
        return loss  # type: ignore[no-any-return]  # the loop's forward is untyped
    every, wanted = count_samples(batch) * targets, batch[1]
    if isinstance(loss, tuple):
        return torch.stack([_at_least_fp32(part) / every for part in loss])
    loss = _at_least_fp32(loss)
    if not isinstance(wanted, Tensor) or wanted.dtype != torch.int64:
        return torch.stack([loss, torch.ones_like(loss)])
    share = (wanted != IGNORED).sum().to(loss.dtype) / every
    return torch.stack([torch.where(share > 0, loss * share, 0.0), share])  # the mean over none is no number


def _at_least_fp32(number: Tensor) -> Tensor:
    """Return the number in fp32 or better: half precision can't count to 1000."""
    return number if number.dtype == torch.float64 else number.float()


def backward_loss(loss: Any) -> Any:
    """Return the number to call backward() on, from the result of a forward pass or `loss_of`. (torch leaves backward
    untyped.)"""
    return loss[0] if isinstance(loss, tuple) or loss.dim() else loss


def normalize_gradients(ranks: Ranks, parameters: Iterable[Tensor], loss: Tensor) -> Tensor:
    """Divide the gradients of a step by the counted share of all ranks' targets, unless all count. `loss` is this
    rank's; return its part of the global mean, which is the mean of the ranks' parts."""
    if not loss.dim():
        return loss
    total, share = loss.unbind()
    inverse = _inverse(mean(ranks, share.clone()))
    torch._foreach_mul_([local_part(p.grad) for p in parameters if p.grad is not None], inverse)
    return total * inverse


def global_mean(ranks: Ranks, loss: Tensor) -> Tensor:
    """Return the mean over the counted targets of all ranks, from each rank's loss."""
    loss = mean(ranks, loss)
    return loss[0] * _inverse(loss[1]) if loss.dim() else loss


def _inverse(share: Tensor) -> Tensor:
    """Return 1 / share; 1 if nothing counts, as the sum and the mean are 0 then."""
    return torch.where(share == 0, 1.0, 1 / share)
