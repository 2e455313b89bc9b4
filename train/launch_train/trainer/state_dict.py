"""The loop's state in one dict: all that the next step depends on, so that a resumed run is the same run.

Each entry says how it is read and how it is put back. What every rank has alike (parameters, the optimizer's moments)
is shared out among the ranks when it is saved; the random states are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from launch_train.checkpointing.partition import State
from launch_train.performance.memory_format import as_parameters
from launch_train.trainer.build import Run


class Entry(NamedTuple):
    """How one entry of the state is read from a run, and put back into one."""

    read: Callable[[Run], Any]
    restore: Callable[[Run, Any], None]


def _read_model(run: Run) -> State:
    return dict(run.model.state_dict())


def _restore_model(run: Run, value: State) -> None:
    run.model.load_state_dict(value)


def _restore_optimizer(run: Run, value: State) -> None:
    """With this start's kernels, whatever those of the one that saved: torch would take over both."""
    pairs = zip(value["param_groups"], run.optimizer.param_groups, strict=True)
    groups = [{**saved, **{name: own[name] for name in _FORM}} for saved, own in pairs]
    run.optimizer.load_state_dict({**value, "param_groups": groups})
    as_parameters(run.optimizer)


_FORM = ("fused", "foreach")


def _restore_loop(run: Run, value: State) -> None:
    run.state.update(value)


ENTRIES: dict[str, Entry] = {
    "model": Entry(_read_model, _restore_model),
    "optimizer": Entry(lambda run: run.optimizer.state_dict(), _restore_optimizer),
    "scaler": Entry(lambda run: run.scaler.state_dict(), lambda run, value: run.scaler.load_state_dict(value)),
    "loop": Entry(lambda run: {**run.state, "seconds": run.seconds}, _restore_loop),
    "guard": Entry(lambda run: run.guard.state_dict(), lambda run, value: run.guard.load_state_dict(value)),
    "metrics": Entry(lambda run: run.recorder.state_dict(), lambda run, value: run.recorder.load_state_dict(value)),
}
"""`loop` has the step, the samples drawn (the position in the data), the last rate and evaluation."""


def read(run: Run) -> State:
    """All entries that are the same on every rank. Tensors are the run's own, not copies."""
    return {name: entry.read(run) for name, entry in ENTRIES.items()}


def restore(run: Run, state: Mapping[str, Any]) -> None:
    """Put all entries back. Raises KeyError if one is missing, and what torch raises if shapes differ."""
    for name, entry in ENTRIES.items():
        entry.restore(run, state[name])


def layout(run: Run) -> Callable[[str], Tensor | None]:
    """For a tensor's path in the state (`optimizer/state/0/exp_avg`): the tensor of this run that is shared out among
    the ranks as that one is to be; None if there is none."""
    model = {f"model/{name}": tensor for name, tensor in _read_model(run).items()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    moments = {f"{_MOMENTS}{number}": parameter for number, parameter in enumerate(parameters)}

    def like(path: str) -> Tensor | None:
        return moments.get(path.rpartition("/")[0]) if path.startswith(_MOMENTS) else model.get(path)

    return like


_MOMENTS = "optimizer/state/"
"""Before the number of a parameter in torch's state of an optimizer, and the name of a moment."""
