"""Attach a start to its run folder: take the lease, restore the newest checkpoint, open the outputs and the saver."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from launch_train import models
from launch_train.checkpointing import interval, rng_state
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing.async_saver import Saver, Snapshot
from launch_train.checkpointing.manifest import Manifest
from launch_train.checkpointing.partition import State
from launch_train.checkpointing.resume_loader import (
    PATIENT_SECONDS,
    Resumed,
    describe_changes,
    describe_settings,
    resume,
    scratch_folder,
    take_over,
)
from launch_train.common.errors import UsageError
from launch_train.common.storage import Storage
from launch_train.common.text import one_line
from launch_train.distributed.process_group import run_on_rank_0
from launch_train.performance.memory_format import match_parameter_layout
from launch_train.trainer.build import Run, open_outputs, seed
from launch_train.trainer.init_from import initialize


def resume_or_start(run: Run, env: Mapping[str, str]) -> Run:
    """Return the run at its newest checkpoint, or at the beginning, with its outputs open and a saver for checkpoints.

    Raises, on all ranks: UsageError (the folder belongs to another spec), SupersededError, OutputError.
    """
    storage = run.storage
    if storage is None:
        initialize(run, env)
        return open_outputs(run, env)
    claim = take_over(run.ranks, storage, manifest_fields(run), env)
    resumed = resume(run.ranks, storage, manifest_fields(run), partial(_restore, run), scratch_folder(env))
    if resumed is None:
        initialize(run, env)
    if run.ranks.rank == 0:
        _print_start(run, storage, resumed)
    run.replica_check.start(run.state["step"])
    keep, best = run.config.checkpoint, list[float]()
    if resumed and keep.keep_best:  # not in the state: a save that a preemption cancelled has none
        by_step = run_on_rank_0(run.ranks, lambda: manifests.metrics(storage.within(PATIENT_SECONDS), keep.keep_metric))
        best = sorted(value for step, value in by_step.items() if step <= resumed.step)[: keep.keep_best]
    run = open_outputs(run, env)  # last: a start that is refused writes nothing and starts no logger
    saver = Saver(
        run.ranks,
        storage,
        keep,
        run.sink,
        start=claim.start,
        lease=claim.lease,
        interval=interval.from_settings(keep, env),
    )
    saver.best = best
    return replace(run, saver=saver, resumed=resumed, started=time.monotonic())


def manifest_fields(run: Run, **more: Any) -> dict[str, Any]:
    """Return the fields that describe the run in a checkpoint's manifest."""
    keys = ("config", "world_size", "device", "device_memory", "precision", "torch", "data", "data_sha256")
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    # In the optimizer's order: it numbers the parameters, and an export needs their names.
    trained = [names[parameter] for group in run.optimizer.param_groups for parameter in group["params"]]
    added = {"micro_batch": run.micro_batches.size, "compiled": run.is_compiled, "trained": trained}
    known = {key: run.facts[key] for key in keys if key in run.facts} | added
    return known | models.describe(run.model) | more


def snapshot(run: Run, **more: Any) -> Snapshot:
    buffers = frozenset(f"model/{name}" for name, _ in run.model.named_buffers())
    per_rank = {"random": rng_state.read_generators(run.ranks.device)}
    if run.state["eval_step"] == run.state["step"] and run.state["eval_loss"] is not None:
        more["eval_loss"] = run.state["eval_loss"]
    return Snapshot(read_state(run), per_rank, manifest_fields(run, **more), buffers)


def _restore(run: Run, checkpoint: Resumed) -> None:
    try:
        restore_state(run, checkpoint.shared_state(state_layout(run)))
        if (per_rank := checkpoint.own(run.ranks)) is not None:
            rng_state.restore_generators(per_rank["random"], run.ranks.device)
        else:
            seed(run.config, run.ranks, checkpoint.manifest.step)
    except (RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise  # memory or a device: not the code's fault, and a retry may succeed
        reason = one_line(error, 400)  # torch uses a line per tensor
        raise UsageError(
            f"{checkpoint.manifest.folder} doesn't fit this code: {reason}. Restore the code that wrote it, or use a "
            "new run folder"
        ) from error
    run.state["interruptions"] += 1


def _print_start(run: Run, storage: Storage, resumed: Manifest | None) -> None:
    if resumed:
        print(f"resumed from step {resumed.step} ({resumed.folder})", flush=True)
        for line in describe_settings(resumed.about, manifest_fields(run)):
            print(f"changed: {line}", flush=True)
        for line in describe_changes(resumed.about, manifest_fields(run)):
            print(f"{line}: same global batch and data order, losses equal within rounding", flush=True)
    elif (days := storage.soft_delete_days()) and run.config.checkpoint.minutes != "off":
        bucket = "/".join(storage.url.split("/")[:3])
        print(
            f"{bucket} keeps deleted checkpoints for {days:g} days and bills them (soft delete). To turn this off: "
            f"gcloud storage buckets update {bucket} --clear-soft-delete",
            flush=True,
        )


# --- The training state: everything that the next step depends on, so that a resumed run computes the same ------------
# State that all ranks share (parameters, the optimizer's moments) is divided among the ranks for saving. Random states
# belong to one rank each: see `snapshot`.


def read_state(run: Run) -> State:
    """Return all state that is the same on every rank. Tensors are not copied."""
    return {
        "model": dict(run.model.state_dict()),
        "optimizer": run.optimizer.state_dict(),
        "scaler": run.scaler.state_dict(),
        "loop": {**run.state, "seconds": run.seconds},
        "guard": run.guard.state_dict(),
        "metrics": run.recorder.state_dict(),
    }


def restore_state(run: Run, state: Mapping[str, Any]) -> None:
    """Restore what `read_state` returned. Raises KeyError for a missing entry, and torch's errors if shapes differ."""
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


def state_layout(run: Run) -> Callable[[str], Tensor | None]:
    """Return a function from a tensor's path in the state (`optimizer/state/0/exp_avg`) to the tensor of this run that
    has the sharding it should get, or None."""
    model = {f"model/{name}": tensor for name, tensor in run.model.state_dict().items()}
    parameters = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    moments = {f"optimizer/state/{number}": parameter for number, parameter in enumerate(parameters)}
    return lambda path: model.get(path, moments.get(path.rpartition("/")[0]))
