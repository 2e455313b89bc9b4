"""Inspect any model: repeated blocks, FLOPs, and whether it fits the data."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.errors import UsageError
from launch_train.data.source import Source
from launch_train.data.user_dataset import BatchRequirements, UserSamples


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks in order: the units of regional compilation, activation checkpointing and sharding.

    They are the items of lists (ModuleList, Sequential) whose items share a class, namely the class of the list with
    the most parameters. Empty if nothing repeats.
    """
    repeating: list[list[nn.Module]] = []
    for module in model.modules():
        items = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        if len(items) < 2 or len({type(item) for item in items}) > 1:
            continue
        is_list = isinstance(items[0], (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        if not is_list and next(items[0].children(), None) is not None:
            repeating.append(items)
    if not repeating:
        return []
    sizes = [sum(parameter.numel() for item in items for parameter in item.parameters()) for items in repeating]
    kind = type(repeating[sizes.index(max(sizes))][0])
    return [block for items in repeating if type(items[0]) is kind for block in items]


def count_flops(model: nn.Module, *batch: Any) -> float | None:
    """Count the floating-point operations of forward and backward for `batch`, or return None if the pass fails.

    Counts matrix products, convolutions and attention (two per multiply-add), and twice the forward pass for the
    backward pass, as in PaLM's appendix B. Meta tensors are enough for a model that doesn't branch on their values.

    The pass runs on a copy of the model that shares the parameters: what a model caches would be on the wrong device.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    on_cpu: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}  # torch only counts CUDA's
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    if any(tensor.is_meta for tensor in batch if isinstance(tensor, Tensor)):
        same = {key: nn.Parameter(value.to("meta"), value.requires_grad) for key, value in same.items()}
        same |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    try:
        passing = deepcopy(model, same)
        with without_compiler(), torch.no_grad(), FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
            passing(*batch)
    except Exception:  # noqa: BLE001 - a custom model may fail in any way; its FLOPs are then unknown
        return None
    return 3.0 * counter.get_total_flops() or None


def without_compiler() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled and no compiled code runs: blocks would be compiled again for each
    shape. If the compiler isn't imported (which takes a second), nothing can be compiled anyway."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def check_vocabulary(vocabulary: int | None, source: Source | None) -> None:
    """Raise UsageError if the data has more tokens than the model's vocabulary (None: the model has none)."""
    needed = getattr(source, "vocab_size", None)
    if vocabulary is not None and needed is not None and vocabulary < needed:
        raise UsageError(f"model.vocab_size: {vocabulary} is too small for the data, which has {needed} tokens")


def check_samples_of(source: Source | None, requirements: BatchRequirements) -> None:
    """Make a custom dataset validate its samples: UsageError if the model doesn't accept one. Ignores other sources."""
    if isinstance(source, UserSamples):
        source.requirements = requirements
