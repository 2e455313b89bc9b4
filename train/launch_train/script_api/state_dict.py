"""The state of a custom script in its checkpoints, by name: read on save, loaded on resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn

from launch_train.checkpointing import rng_state
from launch_train.checkpointing.partition import Split, join, split
from launch_train.checkpointing.resume_loader import Resumed
from launch_train.common.errors import UsageError
from launch_train.distributed import dtensor
from launch_train.distributed.process_group import Ranks
from launch_train.script_api import encoding
from launch_train.script_api.state_comparison import Layout, layout_of

State = MutableMapping[str, Any]
"""Objects with `state_dict` and `load_state_dict`, torch's generators, and plain values."""


def check_names(state: Any) -> Any:
    """Return `state`, if its names are valid in a checkpoint. Raises UsageError."""
    if not isinstance(state, Mapping):
        raise UsageError(f"a checkpoint's state must be a dict by name, not a {type(state).__name__}")
    for name in state:
        if not isinstance(name, str) or not name or "/" in name or name.startswith("$") or name == "ranks":
            raise UsageError(f"{name!r} can't be a name in a checkpoint: use text without / or $, and not 'ranks'")
    return state


def unwrap(model: Any) -> Any:
    """Return the model inside DDP and torch.compile."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return unwrap(model._orig_mod) if isinstance(model, nn.Module) and hasattr(model, "_orig_mod") else model


def check(state: Any, own: Any) -> Layout:
    """Return the layout of `state` before training. Raises UsageError if a checkpoint can't hold `state` or `own`.

    The state of objects in `own` is not read: a data loader would start its workers for it.
    """
    for name, value in check_names(own).items():
        if not _keeps_state(value):
            _split_own(name, value)
    return layout(state, content(state), strict=True)


def content(state: Any) -> dict[str, Any]:
    """Return the state as tensors and plain values. Raises UsageError, with the path, for anything else."""
    return {name: encoding.encode(_read(value), f"state[{name!r}]") for name, value in check_names(state).items()}


def own_content(own: Any) -> dict[str, Any]:
    """Return one rank's `own` values likewise, with tensors copied to host memory. Raises UsageError."""
    parts = {name: _split_own(name, value) for name, value in check_names(own).items()}
    return {
        name: join({path: tensor.to("cpu", copy=True) for path, tensor in part.tensors.items()}, part.rest)
        for name, part in parts.items()
    }


def _split_own(name: str, value: Any) -> Split:
    parts = split(encoding.encode(_read(value), f"own[{name!r}]"))
    if any(dtensor.is_sharded(tensor) for tensor in parts.tensors.values()):
        raise UsageError(f"own[{name!r}] is sharded over the ranks: pass it in the state")
    return parts


def layout(state: Mapping[str, Any], content: Mapping[str, Any], *, strict: bool = False) -> Layout:
    """Return the layout of `state`; `content` is its encoding in a checkpoint."""
    return layout_of(content, [name for name, value in state.items() if isinstance(value, torch.Generator)], strict)


def rank_0_paths(state: Mapping[str, Any], layout: Layout, settled: Collection[str]) -> frozenset[str]:
    """Return the paths of tensors that rank 0 saves for all ranks, as they may differ between ranks: batch norm's
    running averages, `settled` differences, plain values that belong to no object."""
    modules = {name: unwrap(value) for name, value in state.items() if isinstance(value, nn.Module)}
    buffers = {f"{name}/{key}" for name, module in modules.items() for key, _ in module.named_buffers()}
    loose = {name for name, value in state.items() if not _keeps_state(value)}
    values = {path for path, entry in layout.items() if entry.plain and path.partition("/")[0] in loose}
    # The tensor of a plain value has one of three paths: of a tensor, of bytes, of a NumPy number.
    ends = ("", f"/{encoding.BYTES}", f"/{encoding.ARRAY}/content")
    return frozenset(buffers | {f"{path}{end}" for path in values | set(settled) for end in ends})


def _read(value: Any) -> Any:
    value = unwrap(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _keeps_state(value) else value


def _keeps_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def load_resumed(state: State, own: State, ranks: Ranks, resumed: Resumed) -> None:
    """Load a checkpoint into `state`. `own` and the random generators stay unchanged if the number of ranks differs.

    Raises UsageError if the checkpoint doesn't match the state.
    """
    folder = resumed.manifest.folder
    try:
        _put_all(state, encoding.decode(resumed.shared_state(_current_tensors(state))))
        if (mine := resumed.own(ranks)) is not None:
            _put_all(own, encoding.decode(mine["own"]))
            rng_state.restore_generators(mine["random"], ranks.device)
    except KeyError as error:
        raise UsageError(f"{folder} doesn't match this script: it has no {error}") from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise  # out of memory, or a device error: not the script's fault
        raise UsageError(f"{folder} doesn't match this script: {error}") from error


def _current_tensors(state: Mapping[str, Any]) -> Callable[[str], Tensor | None]:
    """Return a function from a checkpoint path to the current tensor whose sharding it takes, or None. A new optimizer
    has no moments yet: they take the sharding of its parameters."""
    now = split(content(state)).tensors
    moments = {
        f"{name}/state/{number}": parameter
        for name, value in state.items()
        if isinstance(value, torch.optim.Optimizer)
        for number, parameter in enumerate(parameter for group in value.param_groups for parameter in group["params"])
    }
    return lambda path: now.get(path, moments.get(path.rpartition("/")[0]))


def _put_all(state: State, saved: Mapping[str, Any]) -> None:
    for name, value in list(state.items()):
        _put(state, name, unwrap(value), saved[name])


def _put(state: State, name: str, value: Any, saved: Any) -> None:
    """Load a saved value into an object that has a state; replace any other value."""
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    elif _keeps_state(value):
        value.load_state_dict(saved)
    else:
        state[name] = _to_devices(saved, value)


def _to_devices(saved: Any, before: Any) -> Any:
    """Return `saved` with its tensors on the devices of the tensors that they replace."""
    if isinstance(saved, Tensor) and isinstance(before, Tensor):
        return saved.to(before.device)
    if isinstance(saved, Mapping) and isinstance(before, Mapping):
        return {key: _to_devices(item, before.get(key)) for key, item in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(before, list | tuple):
        return type(saved)(map(_to_devices, saved, chain(before, repeat(None))))
    return saved
