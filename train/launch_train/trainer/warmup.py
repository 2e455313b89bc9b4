"""Choose the micro-batch of a start (from the spec, the newest checkpoint, or a probe) and run passes before step 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from launch_train.checkpointing.resume_loader import newest_manifest
from launch_train.common.config import Config, as_data
from launch_train.common.storage import Storage
from launch_train.data.batch import split
from launch_train.data.loader import BatchLoader
from launch_train.distributed.process_group import Ranks, run_on_rank_0
from launch_train.performance import compile as compiling
from launch_train.performance import fsdp, loss_normalization, micro_batch, precision
from launch_train.performance.compile import CompilePlan, Forward
from launch_train.performance.micro_batch import MicroBatches
from launch_train.performance.prepare_model import without_communication

SETTINGS = ("micro_batch_size", "precision", "parallel", "activation_checkpointing", "compile", "cuda_graphs")
"""Settings of run.config that may change within a run and affect how many samples fit."""


def choose_micro_batch(
    model: nn.Module,
    config: Config,
    batch_loader: BatchLoader,
    ranks: Ranks,
    initial: MicroBatches,
    policy: precision.PrecisionPolicy,
    storage: Storage | None,
    optimizer_size: int,
) -> MicroBatches:
    """Return the micro-batch of this start.

    It is `initial` if the spec sets a size or the device's memory isn't bounded; else the newest checkpoint's, so that
    a resumed run adds in the same order; else (another machine, no checkpoint) the largest that fits. It never exceeds
    the size that an earlier start had to reduce it to. `optimizer_size` as in `probe_micro_batch`.
    """
    limit = run_on_rank_0(ranks, lambda: micro_batch.load_limit(storage))
    chosen = initial
    if config.micro_batch_size is None and micro_batch.is_memory_bounded(ranks.device):
        plan = compiling.make_plan(model, config, ranks)
        saved = _from_checkpoint(config, ranks, initial, storage)
        chosen = saved or probe_micro_batch(model, batch_loader, ranks, initial, policy, plan, optimizer_size)
    return chosen.at_most(limit, "an earlier start ran out of memory") if limit and limit < chosen.size else chosen


def device_facts(ranks: Ranks) -> dict[str, Any]:
    """Return the facts that decide how many samples fit: device name, memory in bytes (0: not bounded), ranks."""
    if ranks.device.type != "cuda":
        return {"device": ranks.device.type, "device_memory": 0, "world_size": ranks.world}
    properties = torch.cuda.get_device_properties(ranks.device)
    return {"device": properties.name, "device_memory": properties.total_memory, "world_size": ranks.world}


def _from_checkpoint(
    config: Config, ranks: Ranks, initial: MicroBatches, storage: Storage | None
) -> MicroBatches | None:
    """Return the newest checkpoint's micro-batch.

    None if there is no checkpoint, if the trainer did not write it (`resume_or_start` then raises on all ranks), or if
    the machine or the settings have changed, which rank 0 prints.
    """

    def read() -> tuple[int, int, list[str]] | None:
        manifest = newest_manifest(storage) if storage else None
        size = manifest.about.get("micro_batch") if manifest else None
        if manifest is None or not isinstance(size, int) or not isinstance(manifest.about.get("config"), Mapping):
            return None
        now, settings, before = device_facts(ranks), as_data(config), manifest.about
        pairs = [(name, before.get(name, value), value) for name, value in now.items()]
        pairs += [(name, before["config"].get(name), settings[name]) for name in SETTINGS]
        return manifest.step, size, [f"{name} was {was}, now {value}" for name, was, value in pairs if was != value]

    saved = run_on_rank_0(ranks, read)
    if saved is None:
        return None
    step, size, differences = saved
    where = f"the checkpoint of step {step}"
    if not differences:
        return initial.at_most(size, f"as in {where}")
    if ranks.rank == 0:
        print(f"micro-batch: {size} in {where}; probing again: {'; '.join(differences)}", flush=True)
    return None


def probe_micro_batch(
    model: nn.Module,
    batch_loader: BatchLoader,
    ranks: Ranks,
    initial: MicroBatches,
    policy: precision.PrecisionPolicy,
    plan: CompilePlan,
    optimizer_size: int = 2,
) -> MicroBatches:
    """Return the largest micro-batch that fits into this GPU's memory.

    The passes are compiled as in training (`plan`): compiled ones often need much less memory. `optimizer_size`:
    numbers that the optimizer keeps per parameter.
    """
    batch = batch_loader.once(1)

    def passes(forward: Forward, size: int) -> None:
        inputs, targets = split(batch, size)[0]
        for last in (True,) if size == initial.share else (False, True):
            with fsdp.without_peers(model), nullcontext() if last else fsdp.no_sync(model):
                with precision.autocast(policy, ranks.device):
                    loss = forward(inputs, targets)
                loss_normalization.backward_loss(loss).backward()

    def eager(size: int) -> None:
        with torch.compiler.set_stance("force_eager"):
            passes(model, size)

    with without_side_effects(model):
        has_buckets = ranks.world > 1 and not fsdp.has_shards(model)
        reserved = micro_batch.bytes_to_reserve(model, optimizer_size, buckets=has_buckets)
        if plan.mode == "off":
            return micro_batch.probe(ranks, initial.share, eager, reserved)
        with compiling.compiled_for_trial(model, plan) as forward:
            compiled = _until_compiler_fails(partial(passes, forward))
            return micro_batch.probe(ranks, initial.share, eager, reserved, compiled)


def _until_compiler_fails(attempt: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap `attempt`: a compiler failure counts as not fitting, and later calls don't compile again.

    `compiling.compile_model` reports the failure later, and training continues without the compiler.
    """
    failures: list[Exception] = []

    def wrapped(size: int) -> None:
        try:
            with micro_batch.unify_out_of_memory():
                if not failures:
                    return attempt(size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
            failures.append(error)
        raise torch.OutOfMemoryError("not compiled") from failures[0]

    return wrapped


@contextmanager
def trial_pass(
    model: nn.Module,
    batch_loader: BatchLoader,
    size: int,
    ranks: Ranks,
    policy: precision.PrecisionPolicy,
    forward: Any,
    *,
    evaluates: bool = False,
) -> Iterator[None]:
    """Run `size` samples through `forward` without communication. Inside the context the gradients exist.

    `evaluates`: run an evaluation pass instead, without gradients.
    """
    inputs, targets = split(batch_loader.once(1), size)[0]
    with without_side_effects(model):
        with without_communication(model, forward), _evaluating(model) if evaluates else nullcontext():
            with precision.autocast(policy, ranks.device):
                loss = forward(inputs, targets)
            if not evaluates:
                loss_normalization.backward_loss(loss).backward()
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        fsdp.reshard(model)


@contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """On exit, clear the gradients and restore the model's buffers."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
