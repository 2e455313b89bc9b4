"""Activation checkpointing: blocks that keep less of their forward pass, and compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from launch_train.common.config import Checkpointing
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.models import blocks

KEPT = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps"),
)
"""Operators of torch.ops.aten whose results `selective` keeps: matrix products, convolutions and attention cost most of
the time and leave few of the bytes. What torch's own examples of selective checkpointing keep, too."""

WHY = {
    "selective": "{} blocks keep matmuls, attention",
    "full": "{} blocks keep only their inputs",
}


def checkpointed(model: nn.Module, asked: Checkpointing) -> Choice | None:
    """Change the blocks of the model in place; its parameters keep their names, and every result its bits. None: all is
    kept, as asked.

    Raises UsageError if nothing in the model repeats.
    """
    if asked == "none":
        return None
    found = blocks(model)
    if not found:
        raise UsageError(
            f"activation_checkpointing: {asked} works on blocks that repeat, and this model has none; leave it out"
        )
    for block in found:
        _change(block, asked)
    return Choice("activations", asked, WHY[asked].format(len(found)))


def _change(block: nn.Module, asked: Checkpointing) -> None:
    """The block's forward as an attribute of its own: no module is put around it, so that no name changes."""
    again = partial(torch_checkpoint.checkpoint, block.forward, use_reentrant=False)
    if contexts := _contexts(block, asked):
        again = partial(again, context_fn=contexts)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return again(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    plain = block.forward
    block.forward = forward


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(block: nn.Module, asked: Checkpointing) -> Callable[[], Contexts] | None:
    """What surrounds the first forward pass and the second one."""
    norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
    if asked == "selective":
        selective = partial(torch_checkpoint.create_selective_checkpoint_contexts, _policy)
        return partial(_with_frozen, selective, norms) if norms else selective
    return partial(_with_frozen, _nothing, norms) if norms else None


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_OPERATORS = frozenset(getattr(torch.ops.aten, name).default for name in KEPT if hasattr(torch.ops.aten, name))


def _nothing() -> Contexts:
    return nullcontext(), nullcontext()


def _with_frozen(inner: Callable[[], Contexts], norms: list[nn.Module]) -> Contexts:
    first, second = inner()
    return first, _both(_frozen(norms), second)  # in this order: operators inside the second context are counted


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


@contextmanager
def _frozen(norms: list[nn.Module]) -> Iterator[None]:
    """Inside batch norm moves copies of its running averages, which the first pass has brought forward already."""
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: kept.clone() for name, kept in norm._buffers.items() if kept is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
