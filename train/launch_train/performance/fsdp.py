"""`parallel: fsdp`: shard parameters, gradients and moments over the ranks, for models that don't fit one GPU.

torch's fully_shard (FSDP2) gathers a block's parameters where they are needed and frees them afterwards. It is imported
only by runs that use it: the import takes as long as torch itself.

Each rank builds the whole model on the host and moves it to its GPU block by block, sharding each block before the next
one moves: no GPU ever holds the whole model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from launch_train.common.config import Config
from launch_train.common.decisions import Choice
from launch_train.common.errors import UsageError
from launch_train.common.text import si
from launch_train.distributed.dtensor import local_part
from launch_train.distributed.process_group import Ranks
from launch_train.performance.precision import PrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

DEFERRED_GRADIENTS_SHARE = 0.1
"""Largest share of a GPU's memory for unsharded gradients that accumulate until the last micro-batch of a step. Larger
gradients are reduced and sharded after each micro-batch."""

_DEFERRED = "_deferred_gradient_modules"
"""Attribute of a model: its modules whose gradients are reduced in the last micro-batch only."""


def place_model(
    model: nn.Module, config: Config, ranks: Ranks, policy: PrecisionPolicy, blocks: Sequence[nn.Module]
) -> tuple[nn.Module, tuple[Choice, ...]]:
    """Move the model, or with `parallel: fsdp` this rank's shard of it, to the device. Return it and the choices made.

    `blocks` are its repeated blocks. Raises as `shard_model`.
    """
    if config.parallel != "fsdp":
        return model.to(ranks.device), ()
    if ranks.world == 1:
        return model.to(ranks.device), (Choice("parallel", "none", "FSDP needs more than one rank"),)
    return model, shard_model(model, ranks, policy, blocks, moments=1 if config.optimizer.name == "sgd" else 2)


def shard_model(
    model: nn.Module, ranks: Ranks, policy: PrecisionPolicy, blocks: Sequence[nn.Module], *, moments: int
) -> tuple[Choice, ...]:
    """Shard a model in place; it may still be on the host. Collective.

    Call it before building the optimizer, as it replaces the parameters. `moments`: tensors that the optimizer will
    keep per parameter, for the printed sizes. Raises UsageError if a parameter can't be sharded.
    """
    unsharded_bytes, tied = state_bytes(model, moments), has_tied_blocks(model, blocks)
    wrap(model, ranks, policy, [] if tied else blocks)
    deferred = can_defer_gradients(model, ranks)
    setattr(model, _DEFERRED, tuple(sharded_modules(model)) if deferred else ())
    why = f"{si(state_bytes(model, moments))}B of state per rank instead of {si(unsharded_bytes)}B"
    choices = (
        Choice("parallel", "fsdp", why),
        Choice(
            "gradients",
            "once a step" if deferred else "each micro-batch",
            f"unsharded they take {'under' if deferred else 'over'} {DEFERRED_GRADIENTS_SHARE:.0%} of the memory",
        ),
    )
    return (*choices, Choice("fsdp", "in one piece", "blocks share parameters")) if tied else choices


def wrap(model: nn.Module, ranks: Ranks, policy: PrecisionPolicy, blocks: Sequence[nn.Module]) -> None:
    """Apply fully_shard to each block, then to the rest of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if scalars := [name for name, parameter in model.named_parameters() if parameter.dim() == 0]:
        raise UsageError(
            f"parallel: fsdp can't shard {scalars[0]}, a scalar: give it the shape [1], or use parallel: ddp"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard needs it
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    mixed_precision = mixed_precision_policy(model, policy)
    for block in dict.fromkeys(blocks):
        fully_shard(block, mesh=mesh, mp_policy=mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=mixed_precision)


def mixed_precision_policy(model: nn.Module, policy: PrecisionPolicy) -> MixedPrecisionPolicy:
    """Return FSDP's policy: parameters are gathered in autocast's type, gradients reduced in fp32.

    In models with batch norm all parameters stay in fp32, as its running averages do, and autocast casts them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if policy.autocast is None or any(isinstance(module, _BatchNorm) for module in model.modules()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=policy.autocast, reduce_dtype=torch.float32)


def has_tied_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Return whether a parameter belongs to several blocks, or to a block and the rest of the model. It stays one
    parameter only if the model is sharded in one piece."""
    owners: dict[nn.Parameter, set[int]] = {}
    within = {module: number for number, block in enumerate(dict.fromkeys(blocks)) for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(within.get(module, -1))
    return any(len(owner) > 1 for owner in owners.values())


def state_bytes(model: nn.Module, moments: int) -> int:
    """Return the bytes of this rank's parameters, and of the gradients and moments of the trained ones."""
    sizes = [(local_part(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(part.numel() * part.element_size() * (2 + moments if trained else 1) for part, trained in sizes)


def can_defer_gradients(model: nn.Module, ranks: Ranks) -> bool:
    """Return whether unsharded gradients fit until the last micro-batch of a step; on the host they always do."""
    if ranks.device.type != "cuda":
        return True
    gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return gradient_bytes <= DEFERRED_GRADIENTS_SHARE * torch.cuda.get_device_properties(ranks.device).total_memory


# --- Used by the training loop ----------------------------------------------------------------------------------------


def has_shards(model: nn.Module) -> bool:
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return the modules with sharded parameters; the model itself comes first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward passes don't reduce gradients over the ranks, if there is memory for unsharded gradients."""
    modules: Sequence[FSDPModule] = getattr(model, _DEFERRED, ())
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters: after a forward pass without a backward pass the outermost are still gathered."""
    for module in sharded_modules(model):
        module.reshard()


# --- Passes on a single rank ------------------------------------------------------------------------------------------


@contextmanager
def without_peers(model: nn.Module) -> Iterator[None]:
    """Inside, passes take as much memory as in training, but don't communicate: this rank's shards stand in for the
    peers'. If a pass fails on this rank only, no peer waits for it."""
    modules = sharded_modules(model)
    _set_communication(modules, False)
    try:
        yield
    except BaseException:
        if modules:
            cast(Any, modules[0]).reset_iter_state()
        raise
    finally:
        _set_communication(modules, True)


def _set_communication(modules: Sequence[FSDPModule], speaks: bool) -> None:
    for module in modules:
        module.set_custom_all_gather(cast(Any, _AllGather(speaks)))
        module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(speaks)))


class _Allocator:
    """Allocates as torch's own collectives. (Their base class would import FSDP.)"""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocator):
    """torch's collective, or the same without communication."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._speaks:
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # this rank's shard is in place
                part.copy_(input_tensor)
        return None


class _ReduceScatter(_Allocator):
    """torch's collective, or the same without communication."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._speaks:
            return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
