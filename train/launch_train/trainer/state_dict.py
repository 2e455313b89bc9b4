"""The training state in one dict: everything that the next step depends on, so that a resumed run computes the same.

Each entry has a function that reads it and one that restores it. State that all ranks share (parameters, the
optimizer's moments) is divided among the ranks for saving. Random states belong to one rank each: see resume.snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from launch_train.checkpointing.partition import State
from launch_train.performance.memory_format import match_parameter_layout
from launch_train.trainer.build import Run


class StateEntry(NamedTuple):
    """The functions that read one entry of the state from a run, and restore it."""

    read: Callable[[Run], Any]
    restore: Callable[[Run, Any], None]


def _read_model(run: Run) -> State:
    return dict(run.model.state_dict())


def _restore_model(run: Run, value: State) -> None:
    run.model.load_state_dict(value)


def _restore_optimizer(run: Run, value: State) -> None:
    """Restore all but the kernels (fused or foreach), which are this start's; torch would restore them too."""
    pairs = zip(value["param_groups"], run.optimizer.param_groups, strict=True)
    groups = [{**saved, **{name: current[name] for name in _KERNELS}} for saved, current in pairs]
    run.optimizer.load_state_dict({**value, "param_groups": groups})
    match_parameter_layout(run.optimizer)


_KERNELS = ("fused", "foreach")


def _restore_loop(run: Run, value: State) -> None:
    run.state.update(value)


ENTRIES: dict[str, StateEntry] = {
    "model": StateEntry(_read_model, _restore_model),
    "optimizer": StateEntry(lambda run: run.optimizer.state_dict(), _restore_optimizer),
    "scaler": StateEntry(lambda run: run.scaler.state_dict(), lambda run, value: run.scaler.load_state_dict(value)),
    "loop": StateEntry(lambda run: {**run.state, "seconds": run.seconds}, _restore_loop),
    "guard": StateEntry(lambda run: run.guard.state_dict(), lambda run, value: run.guard.load_state_dict(value)),
    "metrics": StateEntry(
        lambda run: run.recorder.state_dict(), lambda run, value: run.recorder.load_state_dict(value)
    ),
}
"""`loop` is `Run.state`."""


def read(run: Run) -> State:
    """Return all entries that are the same on every rank. Tensors are not copied."""
    return {name: entry.read(run) for name, entry in ENTRIES.items()}


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Restore all entries. Raises KeyError if one is missing, and torch's errors if shapes differ."""
    for name, entry in ENTRIES.items():
        entry.restore(run, state[name])


def layout(run: Run) -> Callable[[str], Tensor | None]:
    """Return a function from a tensor's path in the state (`optimizer/state/0/exp_avg`) to the tensor of this run that
    has the sharding it should get, or None."""
    model = {f"model/{name}": tensor for name, tensor in _read_model(run).items()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    moments = {f"{_MOMENTS}{number}": parameter for number, parameter in enumerate(parameters)}

    def like(path: str) -> Tensor | None:
        return moments.get(path.rpartition("/")[0]) if path.startswith(_MOMENTS) else model.get(path)

    return like


_MOMENTS = "optimizer/state/"
"""Prefix of a moment's path; the parameter's number and the moment's name follow."""
