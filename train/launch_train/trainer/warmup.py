"""Choose the micro-batch of a start: the spec's, the newest checkpoint's, or the largest that a probe finds to fit.

Also runs the passes before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from launch_train.checkpointing.loader import newest_manifest
from launch_train.checkpointing.manifest import Manifest
from launch_train.common.config import Config, as_data
from launch_train.common.storage import Storage
from launch_train.data.batch import split
from launch_train.data.loader import Feed
from launch_train.distributed.process_group import Ranks, run_on_rank_0
from launch_train.performance import compile as compiling
from launch_train.performance import fsdp, loss_normalization, micro_batch, precision
from launch_train.performance.compile import Forward, Plan
from launch_train.performance.micro_batch import Portions
from launch_train.performance.prepare_model import silently

SETTINGS = ("micro_batch_size", "precision", "parallel", "activation_checkpointing", "compile", "cuda_graphs")
"""Settings of run.config that may change within a run and affect how many samples fit."""


def chosen(
    model: nn.Module,
    config: Config,
    feed: Feed,
    ranks: Ranks,
    asked: Portions,
    numbers: precision.Numbers,
    storage: Storage | None,
    held: int,
) -> Portions:
    """Return the micro-batch of this start.

    It is `asked` if the spec sets a size or the memory has no bound; otherwise that of the newest checkpoint, so that a
    resumed run adds in the same order; on another machine, and without a checkpoint, the largest one that fits. It is
    never larger than what an earlier start of the run had to reduce it to. `held` as in `probed`.
    """
    known = run_on_rank_0(ranks, lambda: micro_batch.learned(storage))
    found = asked
    if config.micro_batch_size is None and micro_batch.is_bounded(ranks.device):
        plan = compiling.plan(model, config, ranks)
        found = _as_saved(config, ranks, asked, storage) or probed(model, feed, ranks, asked, numbers, plan, held)
    return found.at_most(known, "an earlier start ran out of memory") if known and known < found.size else found


def machine(ranks: Ranks) -> dict[str, Any]:
    """Return the facts of the machine that decide how many samples fit: device name, memory in bytes (0: not bounded)
    and number of ranks."""
    if ranks.device.type != "cuda":
        return {"device": ranks.device.type, "device_memory": 0, "world_size": ranks.world}
    of = torch.cuda.get_device_properties(ranks.device)
    return {"device": of.name, "device_memory": of.total_memory, "world_size": ranks.world}


def _as_saved(config: Config, ranks: Ranks, asked: Portions, storage: Storage | None) -> Portions | None:
    """Return that of the newest checkpoint; None if there is none, if it is not the trainer's own (`begin` refuses it
    on all ranks), or if it was made under other conditions, which rank 0 prints."""

    def look() -> tuple[int, int, list[str]] | None:
        manifest = newest_manifest(storage) if storage else None
        size = manifest.about.get("micro_batch") if manifest else None
        if manifest is None or not isinstance(size, int) or not isinstance(manifest.about.get("config"), Mapping):
            return None
        return manifest.step, size, _differences(manifest, config, ranks)

    saved = run_on_rank_0(ranks, look)
    if saved is None:
        return None
    step, size, differences = saved
    where = f"the checkpoint of step {step}"
    if not differences:
        return asked.at_most(size, f"as in {where}")
    if ranks.rank == 0:
        why = f"conditions changed since {where} (micro-batch {size}): {'; '.join(differences)}"
        print(f"micro-batch: probing again, as {why}", flush=True)
    return None


def _differences(manifest: Manifest, config: Config, ranks: Ranks) -> list[str]:
    now, settings, before = machine(ranks), as_data(config), manifest.about
    pairs = [(name, before.get(name, value), value) for name, value in now.items()]
    pairs += [(name, before["config"].get(name), settings[name]) for name in SETTINGS]
    return [f"{name} was {was}, is {value}" for name, was, value in pairs if was != value]


def probed(
    model: nn.Module,
    feed: Feed,
    ranks: Ranks,
    whole: Portions,
    numbers: precision.Numbers,
    plan: Plan,
    held: int = 2,
) -> Portions:
    """Return the largest micro-batch that fits into this GPU's memory, in passes compiled as in training (`plan`):
    these often need much less. `held` is how many numbers the optimizer keeps per parameter."""
    batch = feed.once(1)

    def passes(forward: Forward, size: int) -> None:
        inputs, targets = split(batch, size)[0]
        for last in (True,) if size == whole.share else (False, True):
            with fsdp.alone(model), nullcontext() if last else fsdp.no_sync(model):
                with precision.autocast(numbers, ranks.device):
                    loss = forward(inputs, targets)
                loss_normalization.differentiated(loss).backward()

    def eager(size: int) -> None:
        with torch.compiler.set_stance("force_eager"):
            passes(model, size)

    with no_trace(model):
        beside = micro_batch.to_reserve(model, held, buckets=ranks.world > 1 and not fsdp.is_sharded(model))
        if plan.mode == "off":
            return micro_batch.probed(ranks, whole.share, eager, beside)
        with compiling.trial(model, plan) as forward:
            compiled = _unless_broken(partial(passes, forward))
            return micro_batch.probed(ranks, whole.share, eager, beside, compiled)


def _unless_broken(attempt: Callable[[int], None]) -> Callable[[int], None]:
    """Return `attempt` such that a compiler failure counts as not fitting and isn't repeated with other sizes.
    `compiling.compiled` reports the failure later, and training continues without the compiler."""
    broken: list[Exception] = []

    def attempted(size: int) -> None:
        try:
            with micro_batch.by_its_name():
                if not broken:
                    return attempt(size)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may fail in any way
            broken.append(error)
        raise torch.OutOfMemoryError("not compiled") from broken[0]

    return attempted


@contextmanager
def first_pass(
    model: nn.Module,
    feed: Feed,
    size: int,
    ranks: Ranks,
    numbers: precision.Numbers,
    forward: Any,
    *,
    evaluates: bool = False,
) -> Iterator[None]:
    """Run `size` samples through `forward` without communication; inside the context the gradients exist, unless it
    `evaluates`."""
    inputs, targets = split(feed.once(1), size)[0]
    with no_trace(model):
        with silently(model, forward), _evaluating(model) if evaluates else nullcontext():
            with precision.autocast(numbers, ranks.device):
                loss = forward(inputs, targets)
            if not evaluates:
                loss_normalization.differentiated(loss).backward()
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
def no_trace(model: nn.Module) -> Iterator[None]:
    """On exit, clear the gradients and restore the model's buffers."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
