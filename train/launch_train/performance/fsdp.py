"""`parallel: fsdp`: each rank has a share of the parameters, gradients and moments, for models that don't fit one GPU.

torch's fully_shard (FSDP2) brings a block's parameters together where they are needed, and drops them after it. It is
imported where a run asks for it: that takes as long as torch itself.

The model is built on the host, whole on each rank, and goes to its GPU block by block, each cut up before the next one
comes: no GPU ever holds all of it.
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
from launch_train.performance.precision import Numbers

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

WHOLE_GRADIENTS = 0.1
"""The part of a GPU's memory that gradients may take that wait, unshared, for the last micro-batch of a step. Larger
ones are reduced and shared out after each micro-batch."""

_WAITING = "_gradients_that_wait"
"""Attribute of a model: those of its modules whose gradients wait so."""


def placed(
    model: nn.Module, config: Config, ranks: Ranks, numbers: Numbers, blocks: Sequence[nn.Module]
) -> tuple[nn.Module, tuple[Choice, ...]]:
    """The model on this rank's device: all of it, or its part of what `parallel: fsdp` shares out; and what to say of
    that. `blocks` are those that repeat in it. As `prepare`."""
    if config.parallel != "fsdp":
        return model.to(ranks.device), ()
    if ranks.world == 1:
        return model.to(ranks.device), (Choice("parallel", "none", "one rank has nobody to share with"),)
    return model, prepare(model, ranks, numbers, blocks, moments=1 if config.optimizer.name == "sgd" else 2)


def prepare(
    model: nn.Module, ranks: Ranks, numbers: Numbers, blocks: Sequence[nn.Module], *, moments: int
) -> tuple[Choice, ...]:
    """Share out a model, in place, that may still be on the host; every rank calls it, before the optimizer is built:
    the parameters are others then. The optimizer will have `moments` for each parameter.

    Raises UsageError: it has a parameter that can't be shared out.
    """
    size, alone = state_bytes(model, moments), tied_blocks(model, blocks)
    wrap(model, ranks, numbers, [] if alone else blocks)
    wait = gradients_may_wait(model, ranks)
    setattr(model, _WAITING, tuple(sharded_modules(model)) if wait else ())
    why = f"{si(state_bytes(model, moments))}B instead of {si(size)}B of state a rank"
    chosen = (Choice("parallel", "fsdp", why), Choice("gradients", *_REDUCED[wait]))
    return (*chosen, Choice("fsdp", "in one piece", "blocks have parameters in common")) if alone else chosen


_REDUCED = {
    True: ("once a step", f"whole they take under {WHOLE_GRADIENTS:.0%} of the memory"),
    False: ("each micro-batch", f"whole they take over {WHOLE_GRADIENTS:.0%} of the memory"),
}
"""When they are added up over the ranks, and why."""


def wrap(model: nn.Module, ranks: Ranks, numbers: Numbers, blocks: Sequence[nn.Module]) -> None:
    """fully_shard on each block, and on what is left around them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    refuse_scalars(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # in no other format can it be shared out
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    how = policy(model, numbers)
    for block in dict.fromkeys(blocks):
        fully_shard(block, mesh=mesh, mp_policy=how)
    fully_shard(model, mesh=mesh, mp_policy=how)


def policy(model: nn.Module, numbers: Numbers) -> MixedPrecisionPolicy:
    """Parameters travel in the numbers that autocast computes with, gradients in fp32. Batch norm's stay in fp32 beside
    its running averages: in models that have it all do, and autocast casts them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if numbers.autocast is None or any(isinstance(module, _BatchNorm) for module in model.modules()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=numbers.autocast, reduce_dtype=torch.float32)


def refuse_scalars(model: nn.Module) -> None:
    """Raise UsageError if a parameter has no dimension along which it could be shared out."""
    found = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if found:
        raise UsageError(
            f"parallel: fsdp can't share out {found[0]}, a single number: give it the shape [1], or use parallel: ddp"
        )


def tied_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether a parameter belongs to several blocks, or to a block and to what is around them: only sharing out the
    model in one piece keeps it one parameter."""
    owners: dict[nn.Parameter, set[int]] = {}
    within = {module: number for number, block in enumerate(dict.fromkeys(blocks)) for module in block.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(within.get(module, -1))
    return any(len(owner) > 1 for owner in owners.values())


def state_bytes(model: nn.Module, moments: int) -> int:
    """Bytes of this rank's parameters, and of the gradient and the moments of each that is trained."""
    sizes = [(local_part(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(part.numel() * part.element_size() * (2 + moments if trained else 1) for part, trained in sizes)


def gradients_may_wait(model: nn.Module, ranks: Ranks) -> bool:
    """Whether whole gradients have room beside the rest until the last micro-batch of a step; on the host they do."""
    if ranks.device.type != "cuda":
        return True
    whole = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return whole <= WHOLE_GRADIENTS * torch.cuda.get_device_properties(ranks.device).total_memory


# --- What the loop asks for -------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether its parameters are shared out."""
    return bool(sharded_modules(model))


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are shared out together; the model itself is the first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)] if fsdp else []


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """In it a backward pass keeps its gradients to this rank, if there is memory for that."""
    modules: Sequence[FSDPModule] = getattr(model, _WAITING, ())
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


def reshard(model: nn.Module) -> None:
    """Back to the ranks' parts: after a pass without a backward one the outermost parameters are still together."""
    for module in sharded_modules(model):
        module.reshard()


# --- Passes of one rank alone -----------------------------------------------------------------------------------------


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Passes inside take the memory that they take in training, but speak to no peer: the parts of the others are taken
    to be like this rank's. If one fails, on this rank only, nobody waits for it."""
    modules = sharded_modules(model)
    _let_speak(modules, False)
    try:
        yield
    except BaseException:
        if modules:
            _forget_pass(modules[0])
        raise
    finally:
        _let_speak(modules, True)


def _forget_pass(root: Any) -> None:
    """Reset what an aborted pass left in the model and its blocks. torch 2.11 lacks reset_iter_state."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    if state._device.type == "cuda":
        torch.cuda.synchronize(state._device)  # in place of waiting for each event of the pass
    state._comm_ctx.all_gather_state = state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        if group := each._fsdp_param_group:
            group._all_gather_result = group._all_reduce_state = group._partial_reduce_output = None
            group._post_reduce_event = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _let_speak(modules: Sequence[FSDPModule], speaks: bool) -> None:
    for module in modules:
        module.set_custom_all_gather(cast(Any, _AllGather(speaks)))
        module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(speaks)))


_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""The second names are those in torch 2.11."""


class _Memory:
    """Allocates as torch's own collectives do. (Their base class is imported with FSDP only.)"""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Memory):
    """torch's, or the same without the peers."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        if self._speaks:
            return _ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            if rank != group.rank():  # this one's is in its place
                part.copy_(input_tensor)
        return None


class _ReduceScatter(_Memory):
    """torch's, or the same without the peers."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._speaks:
            return _REDUCE_SCATTER(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        return output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
