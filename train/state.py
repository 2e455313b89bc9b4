"""The loop's state in one dict: all that the next step depends on, so that a resumed run is the same run.

Each entry says how it is read and how it is put back. What every rank has alike (parameters, the optimizer's moments)
is shared out among the ranks when it is saved; the random states are each rank's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from train import pieces
from train.layout import as_parameters

if TYPE_CHECKING:
    from train.setup import Run

State = dict[str, Any]


class Entry(NamedTuple):
    """How one entry of the state is read from a run, and put back into one."""

    read: Callable[[Run], Any]
    restore: Callable[[Run, Any], None]


def _read_model(run: Run) -> State:
    return dict(run.model.state_dict())


def _restore_model(run: Run, value: State) -> None:
    run.model.load_state_dict(value)


def _restore_optimizer(run: Run, value: State) -> None:
    run.optimizer.load_state_dict(value)
    as_parameters(run.optimizer)


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


# --- Random states: this rank's own -------------------------------------------------------------------------------


def read_random(device: torch.device) -> State:
    """The generators of Python, NumPy and torch (CPU, and this rank's GPU) as tensors and plain values."""
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    inner = {**numpy_state["state"], "key": key}
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": inner},
        "torch": torch.get_rng_state(),
        **cuda,
    }


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators as they were."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    key = state["numpy"]["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# --- Tensors apart from the rest, and shared out among the ranks -----------------------------------------------------

_REF = "$tensor"
"""Key of the dict that stands for a tensor in the rest: its value is the tensor's path."""


class Split(NamedTuple):
    """A state as its tensors by path (`optimizer/state/0/exp_avg`), each storage once, and the rest around them."""

    tensors: dict[str, Tensor]
    rest: Any


def split(state: Any) -> Split:
    """Take the tensors out of nested dicts, lists and tuples. Two names of one tensor (tied weights) share a path."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            here = pieces.local(value)
            same = (here.data_ptr(), value.shape, value.stride())
            first = seen.setdefault(same, path) if here.numel() else path
            tensors.setdefault(first, value)
            return {_REF: first}
        if isinstance(value, Mapping):
            return {key: walk(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([walk(item, f"{path}/{number}") for number, item in enumerate(value)])
        return value

    rest = walk(state, "")
    return Split(tensors, rest)


def joined(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """What `split` took apart. Raises KeyError if a tensor is missing."""
    if isinstance(rest, Mapping):
        if rest.keys() == {_REF}:
            return tensors[rest[_REF]]
        return {key: joined(tensors, item) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)([joined(tensors, item) for item in rest])
    return rest


def shared_out(tensors: Mapping[str, Tensor], world: int, first_only: Collection[str]) -> list[list[str]]:
    """Paths for each rank to save, balanced by size; the same on all ranks. `first_only` are rank 0's: what isn't the
    same on every rank (batch norm's running averages, of which rank 0's count)."""
    shares: list[list[str]] = [[] for _ in range(world)]
    bytes_of = [0] * world
    for path in sorted(tensors, key=lambda path: (-tensors[path].nbytes, path)):
        rank = 0 if path in first_only else bytes_of.index(min(bytes_of))
        shares[rank].append(path)
        bytes_of[rank] += tensors[path].nbytes
    return shares


class Share(NamedTuple):
    """What one rank saves: tensors by path, and of which wholes some of them are parts (as pieces.described)."""

    tensors: dict[str, Tensor]
    parts: dict[str, dict[str, list[int]]]


def share(tensors: Mapping[str, Tensor], rank: int, world: int, first_only: Collection[str]) -> Share:
    """Of those that every rank has: this rank's, as `shared_out`. Of those that are shared out already: its parts."""
    split_up = {path: tensor for path, tensor in tensors.items() if pieces.is_shared_out(tensor)}
    alike = {path: tensor for path, tensor in tensors.items() if path not in split_up}
    mine = {path: alike[path] for path in shared_out(alike, world, first_only)[rank]}
    parts = {path: part for path, tensor in split_up.items() if (part := pieces.local(tensor)).numel()}
    return Share(mine | parts, {path: pieces.described(split_up[path]) for path in parts})


class HostCopies:
    """Copies of tensors in the host's memory, in buffers that are kept for the next time.

    From a GPU the copies are queued in its own stream, so that the training step behind them waits for nothing else;
    `ready` waits until they are there.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._event: torch.cuda.Event | None = None

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start copying. The copies of the time before are overwritten."""
        copies = {path: self._copy(path, tensor) for path, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record()
        return copies

    def ready(self) -> None:
        """Wait for the copies."""
        if self._event:
            self._event.synchronize()

    def _copy(self, path: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)
