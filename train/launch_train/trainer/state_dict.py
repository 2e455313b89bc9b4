"""The training state in one dict: everything that the next step depends on, so that a resumed run computes the same.

State that all ranks share (parameters, the
optimizer's moments) is divided among the ranks for saving. Random states belong to one rank each: see resume.snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from launch_train.checkpointing.partition import State
from launch_train.performance.memory_format import match_parameter_layout
from launch_train.trainer.build import Run


def read(run: Run) -> State:
    """Return all state that is the same on every rank. Tensors are not copied."""
    return {
        "model": dict(run.model.state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "loop": {**run.state, "seconds": run.seconds},
        "guard": run.guard.state_dict(),
        "metrics": run.recorder.state_dict(),
    }


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Restore what `read` returned. Raises KeyError if an entry is missing, and torch's errors if shapes differ."""
    run.model.load_state_dict(state["model"])
    # All but the kernels (fused or foreach), which are this start's; torch would restore them too.
    pairs = zip(state["optimizer"]["param_groups"], run.optimizer.param_groups, strict=True)
    groups = [{**saved, "fused": current["fused"], "foreach": current["foreach"]} for saved, current in pairs]
    run.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
    match_parameter_layout(run.optimizer)
    run.scaler.load_state_dict(state["scaler"])
    run.state.update(state["loop"])
    run.guard.load_state_dict(state["guard"])
    run.recorder.load_state_dict(state["metrics"])


def layout(run: Run) -> Callable[[str], Tensor | None]:
    """Return a function from a tensor's path in the state (`optimizer/state/0/exp_avg`) to the tensor of this run that
    has the sharding it should get, or None."""
    model = {f"model/{name}": tensor for name, tensor in run.model.state_dict().items()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    moments = {f"{_MOMENTS}{number}": parameter for number, parameter in enumerate(parameters)}

    def like(path: str) -> Tensor | None:
        return moments.get(path.rpartition("/")[0]) if path.startswith(_MOMENTS) else model.get(path)

    return like


_MOMENTS = "optimizer/state/"
"""Prefix of a moment's path; the parameter's number and the moment's name follow."""
