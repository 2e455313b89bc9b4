"""What a script of your own keeps in its checkpoints, by name: read when it saves, put back when it goes on."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from train.dist import Ranks
from train.errors import UsageError
from train.saving import randomness
from train.saving.resume import Resumed
from train.scripts import plain

State = MutableMapping[str, Any]
"""Objects with `state_dict` and `load_state_dict`, torch's generators, and plain values."""


def named(state: Any) -> Any:
    """`state`, if its names can be those of a checkpoint. Raises TypeError or ValueError."""
    if not isinstance(state, MutableMapping):
        raise TypeError(f"a checkpoint's state is a dict by name, not a {type(state).__name__}")
    for name in state:
        if not isinstance(name, str) or not name or "/" in name or name.startswith("$") or name == "ranks":
            raise ValueError(f"{name!r} can't be a name in a checkpoint: text without / and $ is, but for ranks")
    return state


def bare(model: Any) -> Any:
    """What is inside DDP and torch.compile."""
    while isinstance(model, nn.Module):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            break
        model = inner
    return model


def content(state: Any) -> dict[str, Any]:
    """What a checkpoint holds of it: tensors and plain values. Raises TypeError, with the place, for anything else."""
    return {name: plain.encoded(_read(value), f"state[{name!r}]") for name, value in named(state).items()}


def buffers(state: Mapping[str, Any]) -> frozenset[str]:
    """Paths of what isn't the same on every rank: batch norm's running averages, of which rank 0's count."""
    modules = {name: bare(value) for name, value in state.items() if isinstance(value, nn.Module)}
    return frozenset(f"{name}/{key}" for name, module in modules.items() for key, _ in module.named_buffers())


def _read(value: Any) -> Any:
    value = bare(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _keeps_state(value) else value


def _keeps_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def put_back(state: State, own: State, ranks: Ranks, found: Resumed) -> None:
    """`own` and the random states are left alone if the run had another number of ranks.

    Raises UsageError if the checkpoint is one of another state.
    """
    folder = found.manifest.folder
    try:
        _put_all(state, plain.decoded(found.shared))
        if (mine := found.own(ranks)) is not None:
            _put_all(own, plain.decoded(mine["own"]))
            randomness.restore(mine["random"], ranks.device)
    except KeyError as error:
        raise UsageError(f"{folder} doesn't fit this script: it has no {error}") from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise  # memory, or a device: no fault of the script
        raise UsageError(f"{folder} doesn't fit this script: {error}") from error


def _put_all(state: State, saved: Mapping[str, Any]) -> None:
    for name, value in list(state.items()):
        _put(state, name, bare(value), saved[name])


def _put(state: State, name: str, value: Any, saved: Any) -> None:
    """Into objects that keep a state; anything else takes the place of what was there."""
    if isinstance(value, torch.Generator):
        value.set_state(saved)
    elif _keeps_state(value):
        value.load_state_dict(saved)
    else:
        state[name] = saved.to(value.device) if isinstance(value, torch.Tensor) else saved
