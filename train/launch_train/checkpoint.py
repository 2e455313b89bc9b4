"""Checkpoints for programs of your own: to read one anywhere (`load`), and to save and go on.

A script saves and goes on in a few lines, under torchrun or not; without a run folder they do nothing:

    from train import checkpoint
    state = {"model": model, "optimizer": optimizer}
    for step in range(checkpoint.restore(state) + 1, steps + 1):
        ...
        if checkpoint.due(step):
            checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()

torch is loaded with the first call that needs it. `launch_train.checkpointing.manifest` says what a checkpoint is.
"""

from __future__ import annotations

import copy
import operator
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import reader
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.common import contract
from launch_train.common.config import Checkpoint as Settings
from launch_train.common.storage import Storage, open_storage

__all__ = ["CheckpointError", "due", "leave", "load", "preempted", "restore", "save"]


def load(url: str, step: int | None = None) -> dict[str, Any]:
    """A checkpoint's whole state for a program of your own: `load(RUN_FOLDER)["model"]` is the model's state_dict, and
    `["ranks"]` has what was each rank's own.

    The newest valid one, or that of `step`. Raises CheckpointError if there is none, or what there is is damaged,
    UsageError if another version of launch wrote it, and OutputError if the storage can't be read.
    """
    storage = open_storage(url)
    wanted = [name for name in manifests.listed(storage.list(f"{contract.CHECKPOINTS}/")) if _is_of(name, step)]
    reasons = [] if wanted else ["there is none"]
    for name in wanted:
        try:
            return _loaded(storage, manifests.read(storage, name))
        except CheckpointError as error:
            reasons.append(str(error))
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(f"{storage.url} has no usable {which}: {'; '.join(reasons)}")


def _loaded(storage: Storage, manifest: Manifest) -> dict[str, Any]:
    from launch_train.api.encoding import decoded
    from launch_train.checkpointing.partition import joined
    from launch_train.distributed.dtensor import wholes

    with tempfile.TemporaryDirectory(prefix="launch-checkpoint-") as folder:
        saved = reader.read_all(manifest.folder, reader.fetch(storage, manifest, Path(folder)))
        state: dict[str, Any] = joined(wholes(saved), saved[0]["rest"])  # copies: the files go
        own = [copy.deepcopy(shard["own"]) for shard in saved]
    try:
        whole: dict[str, Any] = decoded(state) | {"ranks": decoded(own)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{manifest.folder} is not a launch checkpoint: {type(error).__name__}: {error}"
        ) from error
    return whole


def _is_of(name: str, step: int | None) -> bool:
    match = contract.MANIFEST.match(name)
    return step is None or (match is not None and int(match["step"]) == step)


# --- A script of your own: launch_train.api.session does the work
# --------------------------------------------------------


def restore(
    state: MutableMapping[str, Any],
    *,
    own: MutableMapping[str, Any] | None = None,
    minutes: float | Literal["auto", "off"] = "auto",
    keep_last: int = 3,
    keep_every: int = 0,
) -> int:
    """Bring `state` and the random generators to the run's newest checkpoint. Returns its step: 0 in a new run.

    What has `state_dict` and `load_state_dict` is changed in place, inside DDP and torch.compile; any other value
    (numbers, text, bytes, tensors, NumPy arrays, lists and dicts of them) is put into `state`. That is the same on all
    ranks; `own` is what each rank has for itself, and stays as it is if the run had another number of ranks.
    `minutes`, `keep_last` and `keep_every` are as in run.config's `checkpoint`. Call it once, on all ranks, last before
    the loop. Without a run folder it does nothing.

    A state that can't be saved, differs between the ranks (see `save`) or doesn't fit the checkpoint, a run that was
    taken over and a run folder that can't be used end the process in one line, with their exit codes.
    """
    if not os.environ.get(contract.RUN_FOLDER):
        return 0
    from launch_train.api import session

    step: int = session.restore(state, {} if own is None else own, Settings(minutes, keep_last, keep_every))
    return step


def due(step: int) -> bool:
    """Whether to save now: the interval is over, or the machine is to go. All ranks call it after the same steps, and
    are told the same."""
    if not os.environ.get(contract.RUN_FOLDER):
        return False
    from launch_train.api import session

    now: bool = session.due(operator.index(step))
    return now


def save(step: int, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, wait: bool = False) -> None:
    """Save `state`, and each rank's `own`, as they are after `step`, on all ranks. The values are copied now and
    written by a thread; with `wait`, and once the machine is to go, it returns when they are durable.

    The ranks compare names, types, shapes and dtypes first. Where they differ in a number, text, bytes or a tensor
    without dimensions, rank 0's is saved and a line says so once. Other differences, a value that a checkpoint can't
    hold and a step behind the newest end all ranks in one line, with exit code 2.
    """
    if not os.environ.get(contract.RUN_FOLDER):
        return
    from launch_train.api import session

    session.save(operator.index(step), state, own or {}, wait=wait)


def preempted() -> bool:
    """Whether the last `due` said that the machine is to go: the same on all ranks."""
    if not os.environ.get(contract.RUN_FOLDER):
        return False
    from launch_train.api import session

    return session.preempted()


def leave() -> NoReturn:
    """End this process as preempted (exit code 75): another start goes on from what was saved."""
    from launch_train.api import session

    session.go()
