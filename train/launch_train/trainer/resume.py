"""How a start of a run takes up its run folder: the right to write it, the newest checkpoint, the saver of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch_train.checkpointing import interval, rng_state
from launch_train.checkpointing.async_saver import Saver, Snapshot
from launch_train.checkpointing.loader import Resumed, describe_changes, resume, scratch_folder, take_over
from launch_train.checkpointing.manifest import Manifest
from launch_train.common.errors import UsageError
from launch_train.common.storage import Storage
from launch_train.trainer import state_dict
from launch_train.trainer.build import Run, seed


def begin(run: Run, env: Mapping[str, str]) -> Run:
    """The run as its run folder has it: at its newest checkpoint, or at the beginning; with a saver of its own.

    Raises, on all ranks alike, UsageError (the folder belongs to another spec), SupersededError and OutputError.
    """
    storage = run.storage
    if storage is None:
        return run
    claim = take_over(run.ranks, storage, about(run), env)
    resumed = resume(run.ranks, storage, about(run), lambda found: _restore(run, found), scratch_folder(env))
    if run.ranks.rank == 0:
        _tell(run, storage, resumed)
    run.replicas.start(run.state["step"])
    saver = Saver(
        run.ranks,
        storage,
        run.config.checkpoint,
        run.sink,
        start=claim.start,
        lease=claim.lease,
        interval=interval.from_settings(run.config.checkpoint, env),
    )
    return replace(run, saver=saver, resumed=resumed, began=time.monotonic())


def about(run: Run, **more: Any) -> dict[str, Any]:
    """What a manifest says of the run."""
    kept = ("config", "world_size", "device", "device_memory", "precision", "torch", "data", "data_sha256")
    own = {"micro_batch": run.portions.size, "compiled": run.is_compiled}
    return {key: run.facts[key] for key in kept if key in run.facts} | own | more


def to_save(run: Run, **more: Any) -> Snapshot:
    """All that a checkpoint holds, as it is now."""
    buffers = frozenset(f"model/{name}" for name, _ in run.model.named_buffers())
    own = {"random": rng_state.read(run.ranks.device)}
    return Snapshot(state_dict.read(run), own, about(run, **more), buffers)


def _restore(run: Run, found: Resumed) -> None:
    try:
        state_dict.restore(run, found.shared_state(state_dict.layout(run)))
        if (own := found.own(run.ranks)) is not None:
            rng_state.restore(own["random"], run.ranks.device)
        else:
            seed(run.config, run.ranks, found.manifest.step)
    except (RuntimeError, KeyError, ValueError) as error:
        if isinstance(error, RuntimeError) and "state_dict" not in str(error):
            raise  # memory, or a device: no fault of the code, and not for good
        said = " ".join(str(error).split())[:400]  # torch names each tensor on a line of its own
        raise UsageError(f"{found.manifest.folder} doesn't fit this code: {said}") from error
    run.state["interruptions"] += 1


def _tell(run: Run, storage: Storage, resumed: Manifest | None) -> None:
    if resumed:
        print(f"resumed at step {resumed.step} from {resumed.folder}", flush=True)
        for line in describe_changes(resumed.about, about(run)):
            print(f"{line}: same global batch and order of data, losses equal within rounding", flush=True)
    elif (days := storage.soft_delete_days()) and run.config.checkpoint.minutes != "off":
        bucket = "/".join(storage.url.split("/")[:3])
        print(
            f"{bucket} keeps deleted checkpoints for {days:g} days and bills them (soft delete); "
            f"gcloud storage buckets update {bucket} --clear-soft-delete ends that",
            flush=True,
        )
