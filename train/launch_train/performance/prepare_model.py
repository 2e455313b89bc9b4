"""How a model is made to train fast on this machine: what is chosen, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch_train.common.config import Config, Ddp, Foreign
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.common.storage import Storage
from launch_train.distributed.process_group import Ranks, gather
from launch_train.performance import activation_checkpointing, fsdp, memory_format
from launch_train.performance import compile as compiling
from launch_train.performance.compile import Forward, Pass, Plan
from launch_train.performance.eager import EagerDDP
from launch_train.performance.precision import Numbers

MIB = 1 << 20

BUCKET = 25 * MIB
"""Bytes of gradients that DDP sends together where it isn't told otherwise (torch 2.13; in the first bucket 1 MiB)."""

BUCKETS = 4
"""Fewer leave too little of the backward pass to send the first ones behind."""

GRAPHS = ("graph looked at each time", "static graph")

NAMED = 5
"""Parameters that a message names."""


class Prepared(NamedTuple):
    """`model` is the bare one, whose state is saved; `forward` is the one that is trained: in DDP, perhaps compiled;
    `evaluated` is for evaluations: without DDP."""

    model: nn.Module
    forward: Any
    evaluated: Any
    choices: tuple[Choice, ...]


def shaped(model: nn.Module, config: Config, ranks: Ranks, numbers: Numbers) -> tuple[Choice, ...]:
    """What changes how much memory a pass takes, and so comes before the micro-batch is chosen: done to the model in
    place. Its parameters stay the same objects with the same names.

    Raises UsageError: this model or this device can't do what the spec asks for.
    """
    if config.cuda_graphs and ranks.device.type != "cuda":
        raise UsageError(f"cuda_graphs: true needs an NVIDIA GPU, and this process runs on {ranks.device.type}")
    sharded = config.parallel == "fsdp" and ranks.world > 1  # which lays parameters out in its own way
    order = (
        None
        if sharded
        else memory_format.channels_last(model, config, ranks.device, halved=numbers.autocast is not None)
    )
    found = (
        order,
        activation_checkpointing.checkpointed(model, config.activation_checkpointing),
        memory_format.vocabulary(config, ranks.device),
    )
    return tuple(choice for choice in found if choice)


def prepare(
    model: nn.Module,
    config: Config,
    ranks: Ranks,
    *,
    accumulates: bool,
    first: Pass,
    storage: Storage | None = None,
) -> Prepared:
    """The model for training on this rank's device. `accumulates`: a step may have several backward passes; `first` is
    one such pass, to try with; in `storage` is what an earlier start has compiled."""
    plan = compiling.plan(model, config, ranks, accumulates=accumulates)
    ddp = ranks.world > 1 and not fsdp.is_sharded(model)
    unused = _unused(model, ranks, first) if ddp and isinstance(config.model, Foreign) else []
    wrap, told = _in_ddp(model, config, ranks, plan, accumulates, unused) if ddp else (lambda: model, ())
    evaluates = config.eval.every > 0
    made = compiling.compiled(model, wrap, plan, ranks, first, storage, evaluates=evaluates)
    return Prepared(model, made.forward, made.evaluated, (*made.choices, *told))


def _in_ddp(
    model: nn.Module, config: Config, ranks: Ranks, plan: Plan, accumulates: bool, unused: list[str]
) -> tuple[Callable[[], nn.Module], tuple[Choice, ...]]:
    """What puts the model into DDP, and what was chosen for that."""
    asked, whole = config.ddp, plan.mode == "whole"
    static = static_graph(asked.static_graph, whole=whole, accumulates=accumulates, unused=bool(unused))
    mib = asked.bucket_mib or bucket_mib(_gradient_bytes(model))
    how = {"static": static.chosen == GRAPHS[True], "unused": bool(unused), "view": asked.gradient_as_bucket_view}
    return partial(in_ddp, model, ranks, mib, whole=whole, **how), (static, *_told(asked, mib, unused))


def in_ddp(
    model: nn.Module, ranks: Ranks, mib: int | None, *, static: bool, unused: bool, whole: bool, view: bool = True
) -> DistributedDataParallel:
    """`mib`: of gradients that are sent together; `unused`: parameters may get no gradient; `whole`: DDP is compiled
    with the model; `view`: gradients lie in the buckets."""
    return (DistributedDataParallel if whole else EagerDDP)(
        model,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=view,
        static_graph=static,
        find_unused_parameters=unused,
        bucket_cap_mb=mib,
    )


def static_graph(asked: bool | None, *, whole: bool, accumulates: bool, unused: bool) -> Choice:
    """Whether DDP may rely on each backward pass being like the last one: it then looks for nothing any more. Raises
    UsageError: it is asked for where they aren't alike."""
    reasons = {
        "DDP is compiled with the model": whole,
        "the gradients of several passes add up": accumulates,
        "parameters get no gradient": unused,
    }
    against = next((reason for reason, holds in reasons.items() if holds), "")
    if asked and against:
        raise UsageError(f"ddp.static_graph: true can't be had: {against}")
    if asked is not None:
        return Choice("ddp", GRAPHS[asked], "the spec says so")
    return Choice("ddp", GRAPHS[not against], against or "each pass is like the last one")


def bucket_mib(size: int) -> int | None:
    """How much DDP sends together of `size` bytes of gradients: torch's own choice (None) for models that it cuts into
    BUCKETS or more, and for those that fit into one, which take hardly any time to send."""
    if size <= BUCKET or size >= BUCKETS * BUCKET:
        return None
    return size // BUCKETS // MIB


def _gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _told(asked: Ddp, mib: int | None, unused: list[str]) -> Iterator[Choice]:
    if asked.bucket_mib:
        yield Choice("buckets", f"{mib} MiB", "the spec says so")
    elif mib:
        yield Choice("buckets", f"{mib} MiB", f"{BUCKETS} of them, sent during the backward pass")
    if not asked.gradient_as_bucket_view:
        yield Choice("gradients", "copied to buckets", "the spec says so")
    if unused:
        yield Choice("unused", "looked for", f"no gradient for {_some(unused)}")


# --- Parameters without a gradient ------------------------------------------------------------------------------------


def _unused(model: nn.Module, ranks: Ranks, first: Pass) -> list[str]:
    """Parameters that a pass leaves without a gradient on some rank: DDP would wait for them unless it is told. Models
    of ours have none."""
    with first(model):
        mine = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return sorted({name for names in gather(ranks, mine) for name in names})


def explained(error: RuntimeError, model: nn.Module) -> UsageError | None:
    """What DDP's error says in its own terms, if it is about parameters that got a gradient at first and then none."""
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if not found:
        return None
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [names[int(number)] for number in found[1].split() if int(number) < len(names)]
    return UsageError(
        f"a step left {_some(missing)} without a gradient, which had one in the first step: with several processes "
        "what a model computes must not depend on the data (add 0 * parameter.sum() to the loss)"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


# --- A pass that no other rank hears of -------------------------------------------------------------------------------


@contextmanager
def silently(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Passes through `forward` inside speak to no peer: one that fails on this rank alone leaves nobody waiting."""
    wrapped = getattr(forward, "_orig_mod", forward)
    with fsdp.alone(model), wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext():
        yield
