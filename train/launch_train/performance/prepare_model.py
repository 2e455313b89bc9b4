"""Prepare a model for training on this machine: memory settings, compilation, DDP."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch_train.common.config import Config, Ddp, ExternalModel
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.common.storage import Storage
from launch_train.common.text import listed
from launch_train.distributed.process_group import Ranks, gather
from launch_train.performance import activation_checkpointing, fsdp, memory_format
from launch_train.performance import compile as compiling
from launch_train.performance.compile import CompiledModel, CompilePlan, Forward, TrialPass
from launch_train.performance.eager import EagerDDP
from launch_train.performance.precision import PrecisionPolicy

MIB = 1 << 20

BUCKET_BYTES = 25 * MIB
"""DDP's default bucket size (torch 2.13; its first bucket has 1 MiB)."""

MIN_BUCKETS = 4
"""With fewer buckets too little of the communication overlaps with the backward pass."""

GRAPHS = ("dynamic graph", "static graph")

MAX_NAMES = 5
"""Parameter names in a message."""


def apply_memory_settings(
    model: nn.Module, config: Config, ranks: Ranks, policy: PrecisionPolicy
) -> tuple[Choice, ...]:
    """Apply the settings that change the memory of a pass, in place; call it before choosing the micro-batch.

    Parameters stay the same objects with the same names. Raises UsageError if this model or device doesn't support a
    setting.
    """
    if config.cuda_graphs and ranks.device.type != "cuda":
        raise UsageError(f"cuda_graphs: true needs an NVIDIA GPU; this process runs on {ranks.device.type}")
    choices = [
        activation_checkpointing.checkpoint_blocks(model, config.activation_checkpointing),
        memory_format.vocabulary_choice(config, ranks.device),
    ]
    if config.parallel != "fsdp" or ranks.world == 1:  # FSDP has its own memory layout
        half_precision = policy.autocast is not None
        choices.insert(0, memory_format.use_channels_last(model, config, ranks.device, half_precision=half_precision))
    return tuple(choice for choice in choices if choice)


def prepare(
    model: nn.Module,
    config: Config,
    ranks: Ranks,
    *,
    accumulates: bool,
    trial_pass: TrialPass,
    storage: Storage | None = None,
) -> CompiledModel:
    """Compile the model and wrap it in DDP, as configured and as the machine supports.

    `accumulates`: a step may have several backward passes. `trial_pass` runs one of them. `storage` holds the code that
    an earlier start compiled.
    """
    plan = compiling.make_plan(model, config, ranks, accumulates=accumulates)
    ddp = ranks.world > 1 and not fsdp.has_shards(model)
    unused: list[str] = []
    if ddp and isinstance(config.model, ExternalModel):  # DDP would wait for their gradients; our models have none
        with trial_pass(model):
            here = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        unused = sorted({name for names in gather(ranks, here) for name in names})
    wrap, ddp_choices = _plan_ddp(model, config, ranks, plan, accumulates, unused) if ddp else (lambda: model, ())
    evaluates = config.eval.every > 0
    compiled = compiling.compile_model(model, wrap, plan, ranks, trial_pass, storage, evaluates=evaluates)
    return compiled._replace(choices=(*compiled.choices, *ddp_choices))


def _plan_ddp(
    model: nn.Module, config: Config, ranks: Ranks, plan: CompilePlan, accumulates: bool, unused: list[str]
) -> tuple[Callable[[], nn.Module], tuple[Choice, ...]]:
    """Return the function that wraps the model in DDP, and the choices made for it."""
    settings, whole = config.ddp, plan.mode == "whole"
    static = static_graph_choice(settings.static_graph, whole=whole, accumulates=accumulates, unused=bool(unused))
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    mib = settings.bucket_mib or bucket_mib(gradient_bytes)
    wrap = partial(
        DistributedDataParallel if whole else EagerDDP,
        model,
        device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=static.chosen == GRAPHS[True],
        find_unused_parameters=bool(unused),
        bucket_cap_mb=mib,
    )
    return wrap, (static, *_ddp_choices(settings, mib, unused))


def static_graph_choice(configured: bool | None, *, whole: bool, accumulates: bool, unused: bool) -> Choice:
    """Decide whether DDP may assume the same graph in each backward pass, which saves it work.

    Raises UsageError if the spec sets it and the passes differ.
    """
    reasons = {
        "DDP is compiled with the model": whole,
        "gradients accumulate over micro-batches": accumulates,
        "some parameters get no gradient": unused,
    }
    reason_against = next((reason for reason, holds in reasons.items() if holds), "")
    if configured and reason_against:
        raise UsageError(f"ddp.static_graph: true is not available: {reason_against}; remove the setting")
    if configured is not None:
        return Choice("ddp", GRAPHS[configured], "set in the spec")
    return Choice("ddp", GRAPHS[not reason_against], reason_against or "the same operations run every step")


def bucket_mib(gradient_bytes: int) -> int | None:
    """Return DDP's bucket size in MiB for that many bytes of gradients.

    None (torch's default) if that makes MIN_BUCKETS or more, or a single bucket, which takes hardly any time to send.
    """
    if gradient_bytes <= BUCKET_BYTES or gradient_bytes >= MIN_BUCKETS * BUCKET_BYTES:
        return None
    return gradient_bytes // MIN_BUCKETS // MIB


def _ddp_choices(settings: Ddp, mib: int | None, unused: list[str]) -> Iterator[Choice]:
    if settings.bucket_mib:
        yield Choice("buckets", f"{mib} MiB", "set in the spec")
    elif mib:
        yield Choice("buckets", f"{mib} MiB", f"{MIN_BUCKETS} buckets, sent during the backward pass")
    if not settings.gradient_as_bucket_view:
        yield Choice("gradients", "copied to buckets", "set in the spec")
    if unused:
        yield Choice("unused", "searched for", f"no gradient for {listed(unused, MAX_NAMES)}")


# --- Parameters without a gradient ------------------------------------------------------------------------------------


def explain_missing_gradient(error: RuntimeError, model: nn.Module) -> UsageError | None:
    """Return a readable error if DDP's is about parameters that had a gradient in the first step and have none now."""
    numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    if not numbers:
        return None
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    missing = [names[int(number)] for number in numbers[1].split() if int(number) < len(names)]
    return UsageError(
        f"no gradient in this step, but one in the first, for {listed(missing, MAX_NAMES)}: with several processes the "
        "parameters that a model uses must not depend on the data (add 0 * parameter.sum() to the loss)"
    )


# --- Passes without communication -------------------------------------------------------------------------------------


@contextmanager
def without_communication(model: nn.Module, forward: Forward) -> Iterator[None]:
    """Inside, passes through `forward` don't communicate: if one fails on this rank only, no peer waits for it."""
    wrapped = getattr(forward, "_orig_mod", forward)
    with (
        fsdp.without_peers(model),
        wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext(),
    ):
        yield
