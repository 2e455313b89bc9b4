"""Checkpoints for custom scripts: load one anywhere (`load`), or save and resume in a training script.

A script needs a few lines, under torchrun or not; without a run folder they do nothing:

    from launch_train import checkpoint
    state = {"model": model, "optimizer": optimizer}
    for step in range(checkpoint.restore(state) + 1, steps + 1):
        ...
        if checkpoint.due(step):
            checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()

torch is imported by the first call that needs it. The format is documented in `launch_train.checkpointing.manifest`.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.common import contract
from launch_train.common.config import Checkpoint as Settings
from launch_train.common.scratch import temporary_folder
from launch_train.common.storage import Storage, open_storage

__all__ = ["CheckpointError", "due", "leave", "load", "preempted", "restore", "save"]


def load(url: str, step: int | None = None) -> dict[str, Any]:
    """Return the complete state of a checkpoint: the newest valid one, or that of `step`.

    `load(RUN_FOLDER)["model"]` is the model's state_dict; `["ranks"]` lists the per-rank values (`own`) of each rank.

    Raises CheckpointError if no such checkpoint exists or all of them are damaged, UsageError if another version of
    launch wrote it, and OutputError if the storage can't be read.
    """
    storage = open_storage(url)
    wanted = manifests.manifest_names(storage, step)
    reasons = [] if wanted else ["none exists"]
    for name in wanted:
        try:
            return _load_state(storage, manifests.read(storage, name))
        except CheckpointError as error:
            reasons.append(str(error))
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(f"{storage.url} has no usable {which}: {'; '.join(reasons)}")


def _load_state(storage: Storage, manifest: Manifest) -> dict[str, Any]:
    from launch_train.checkpointing.partition import join
    from launch_train.distributed.dtensor import assemble, saved_tensors
    from launch_train.script_api.encoding import decode

    with temporary_folder("checkpoint") as folder:
        saved = manifests.read_all(manifest.folder, manifests.fetch(storage, manifest, Path(folder)))
        tensors = {path: assemble(tensor) for path, tensor in saved_tensors(saved).items()}
        state: dict[str, Any] = join(tensors, saved[0]["rest"])  # copies, as the files are deleted
        own = [copy.deepcopy(shard["own"]) for shard in saved]
    try:
        whole: dict[str, Any] = decode(state) | {"ranks": decode(own)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest.folder} is not a launch checkpoint: {type(error).__name__}: {error}"
        ) from error
    return whole


# --- For a training script; the implementation is launch_train.script_api.session -------------------------------------


def restore(
    state: MutableMapping[str, Any],
    *,
    own: MutableMapping[str, Any] | None = None,
    minutes: float | Literal["auto", "off"] = "auto",
    keep_last: int = 3,
    keep_every: int = 0,
) -> int:
    """Load the run's newest checkpoint into `state` and the random generators. Returns its step, 0 for a new run.

    Objects with `state_dict` and `load_state_dict` are changed in place, also inside DDP and torch.compile. Other
    values (numbers, text, bytes, tensors, NumPy arrays, and lists and dicts of them) are replaced in `state`. `state`
    is the same on all ranks. `own` holds per-rank values; it is left unchanged if the number of ranks has changed.
    `minutes`, `keep_last` and `keep_every` are as in run.config's `checkpoint`. Call it once, on all ranks, directly
    before the training loop. Without a run folder it does nothing.

    The process exits with a one-line error and its exit code if the state can't be saved, differs between the ranks
    (see `save`) or doesn't match the checkpoint, if another start has taken over the run, or if the run folder can't be
    used.
    """
    if not (session := _session()):
        return 0
    step: int = session.restore(state, {} if own is None else own, Settings(minutes, keep_last, keep_every))
    return step


def due(step: int) -> bool:
    """Return whether to save now: the interval has passed, or the machine is being preempted.

    All ranks must call it after the same steps; all get the same answer.
    """
    session = _session()
    return bool(session) and session.due(operator.index(step))


def save(step: int, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, wait: bool = False) -> None:
    """Save `state`, and each rank's `own`, as the checkpoint of `step`. All ranks must call it.

    The values are copied now and written by a thread. With `wait`, and once the machine is being preempted, it returns
    when they are durable.

    The ranks first compare names, types, shapes and dtypes. Where they differ in a number, text, bytes or a
    zero-dimensional tensor, rank 0's value is saved and a line says so once. Any other difference, a value that a
    checkpoint can't hold, and a step before the newest one end all ranks with a one-line error and exit code 2.
    """
    if session := _session():
        session.save(operator.index(step), state, own or {}, wait=wait)


def preempted() -> bool:
    """Return whether the last `due` reported a preemption: the same on all ranks."""
    session = _session()
    return bool(session) and session.preempted()


def leave() -> NoReturn:
    """Exit as preempted (exit code 75); the next start resumes from the newest checkpoint."""
    from launch_train.script_api import session

    session.leave_preempted()


def _session() -> Any:
    """Return the implementation, or None without a run folder."""
    if not os.environ.get(contract.RUN_FOLDER):
        return None
    from launch_train.script_api import session

    return session
