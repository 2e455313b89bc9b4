"""What a model is made of: blocks that repeat, and how much it computes. Works on anyone's model."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.errors import UsageError
from launch_train.data.source import Source
from launch_train.data.user_dataset import OwnSamples
from launch_train.data.validation import Suits


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that repeat, in their order: what is worth a compiled region, a checkpoint of activations or a shard.

    They are the items of those lists (ModuleList, Sequential) whose items share a class; the list with the most
    parameters says which class. Empty where nothing repeats.
    """
    lists = [found for module in model.modules() if (found := _alike(module))]
    if not lists:
        return []
    kind = type(max(lists, key=_weight)[0])
    return [block for found in lists if type(found[0]) is kind for block in found]


def _alike(module: nn.Module) -> list[nn.Module]:
    """The items of a list of two or more blocks of one class: modules of several parts, and no lists themselves."""
    items = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
    if len(items) < 2 or len({type(item) for item in items}) > 1 or isinstance(items[0], _LISTS):
        return []
    return items if any(True for _ in items[0].children()) else []


_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _weight(items: list[nn.Module]) -> int:
    return sum(parameter.numel() for item in items for parameter in item.parameters())


def counted(model: nn.Module, *batch: Any) -> float | None:
    """Floating-point operations of forward and backward for `batch`, counted in a pass that leaves no trace: those of
    matrix products, convolutions and attention, two for a multiplication and addition, and twice the forward pass for
    the backward, as in PaLM's appendix B. A batch of meta tensors, which have no data, is enough for a model that
    decides nothing by their values. None where the pass fails.

    A copy of the model makes the pass, with the parameters themselves: what a model keeps for the next time would be on
    the wrong device then."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    on_cpu: Any = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}  # torch knows CUDA's alone
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    if any(tensor.is_meta for tensor in batch if isinstance(tensor, Tensor)):
        same = {key: nn.Parameter(one.to("meta"), one.requires_grad) for key, one in same.items()}
        same |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    try:
        passing = deepcopy(model, same)
        with _eager(), torch.no_grad(), FlopCounterMode(display=False, custom_mapping=on_cpu) as counter:
            passing(*batch)
    except Exception:  # noqa: BLE001 - anyone's model may do anything; what it costs is then not known
        return None
    return 3.0 * counter.get_total_flops() or None


def _eager() -> AbstractContextManager[Any]:
    """In it nothing is compiled: a block would be, for one sample, and again for the first step. Where the compiler,
    which takes a second to load, isn't there, nothing can be."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def enough(vocabulary: int | None, source: Source | None) -> None:
    """Raises UsageError: the source has tokens that a model with this vocabulary doesn't know. None: it has none."""
    needed = getattr(source, "vocab_size", None)
    if vocabulary is not None and needed is not None and vocabulary < needed:
        raise UsageError(f"model.vocab_size: {vocabulary} is too small for the data, which has {needed} tokens")


def suited(source: Source | None, suits: Suits) -> None:
    """From now on samples of the user's own are looked at before the model gets them: UsageError where it can't take
    one. Other sources have seen to that themselves."""
    if isinstance(source, OwnSamples):
        source.suits = suits
