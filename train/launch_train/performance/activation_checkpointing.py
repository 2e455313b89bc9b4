"""Activation checkpointing: blocks save fewer activations and recompute them in the backward pass."""

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

SAVED_OPERATORS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math_for_mps"),
)
"""Operators of torch.ops.aten whose results `selective` saves: matrix products, convolutions and attention take most of
the time and few of the bytes. PyTorch's examples of selective checkpointing save the same."""

WHY = {
    "selective": "{} blocks save matmuls and attention",
    "full": "{} blocks save only their inputs",
}


def checkpoint_blocks(model: nn.Module, mode: Checkpointing) -> Choice | None:
    """Checkpoint the repeated blocks of the model in place, or return None if `mode` is none.

    Parameters keep their names and results their bits. Raises UsageError if the model has no repeated blocks.
    """
    if mode == "none":
        return None
    repeated = blocks(model)
    if not repeated:
        raise UsageError(
            f"activation_checkpointing: {mode} needs repeated blocks, and this model has none; remove the setting"
        )
    for block in repeated:
        _checkpoint_block(block, mode)
    return Choice("activations", mode, WHY[mode].format(len(repeated)))


def _checkpoint_block(block: nn.Module, mode: Checkpointing) -> None:
    """Replace the block's forward method. A wrapper module would change the names of its parameters."""
    checkpointed = partial(torch_checkpoint.checkpoint, block.forward, use_reentrant=False)
    if contexts := _contexts(block, mode):
        checkpointed = partial(checkpointed, context_fn=contexts)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpointed(*args, **kwargs) if torch.is_grad_enabled() else original(*args, **kwargs)

    original = block.forward
    block.forward = forward


Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def _contexts(block: nn.Module, mode: Checkpointing) -> Callable[[], Contexts] | None:
    """Return the function that makes the contexts of the first forward pass and of its recomputation."""
    norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
    if mode == "selective":
        selective = partial(torch_checkpoint.create_selective_checkpoint_contexts, _policy)
        return partial(_with_frozen_norms, selective, norms) if norms else selective
    return partial(_with_frozen_norms, lambda: (nullcontext(), nullcontext()), norms) if norms else None


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE


_OPERATORS = frozenset(
    getattr(torch.ops.aten, name).default for name in SAVED_OPERATORS if hasattr(torch.ops.aten, name)
)


def _with_frozen_norms(inner: Callable[[], Contexts], norms: list[nn.Module]) -> Contexts:
    first, second = inner()
    return first, _both(_frozen_norms(norms), second)  # in this order: operators inside the second context are counted


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _frozen_norms(norms: list[nn.Module]) -> Iterator[None]:
    """Let batch norm update copies of its running averages in the recomputation: the first pass has updated them."""
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: buffer.clone() for name, buffer in norm._buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
