"""Everything that a run needs before its first step."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from launch_train import models
from launch_train.bench import peaks
from launch_train.checkpointing.async_saver import Saver
from launch_train.checkpointing.manifest import Manifest
from launch_train.common import contract
from launch_train.common.config import Config, as_data
from launch_train.common.console import RateLimiter
from launch_train.common.decisions import Choice, format_choices
from launch_train.common.heartbeat import Heartbeat
from launch_train.common.step_timer import Stopwatch, stopwatch
from launch_train.common.storage import Storage, open_storage
from launch_train.common.text import si
from launch_train.data import Source, open_data
from launch_train.data.loader import Feed
from launch_train.data.source import draw, share
from launch_train.distributed.consensus import Agreement
from launch_train.distributed.process_group import Ranks
from launch_train.monitoring.monitor import Monitor, open_monitor
from launch_train.performance import attention, fsdp, loss_normalization, precision
from launch_train.performance import micro_batch as memory
from launch_train.performance import optimizer as optim
from launch_train.performance.grad_guard import Guard
from launch_train.performance.micro_batch import Portions
from launch_train.performance.prepare_model import prepare, shaped
from launch_train.profiling.profiler import Profiler, open_profiler
from launch_train.telemetry.metric_sink import Null, Sink, open_sink
from launch_train.trainer import warmup
from launch_train.trainer.metrics_buffer import Recorder
from launch_train.trainer.replica_check import Replicas
from launch_train.trainer.warmup import first_pass

DROPOUT, OWN = 2, 3
"""Streams of random numbers (launch_train.data.source has 0 and 1): torch's, and Python's and NumPy's for who uses
them."""

FRESH: Mapping[str, Any] = MappingProxyType(
    {"step": 0, "samples": 0, "eval_loss": None, "eval_due": False, "seconds": 0.0, "interruptions": 0}
    | {"micro_batch": 0}
)
"""The loop's own state: steps done, samples drawn (the position in the data), the newest held-out loss and whether one
is due, seconds of training before this start, how often the run was interrupted, and the micro-batch that it has come
down to since (0: it hasn't)."""


@dataclass(frozen=True)
class Run:
    """The parts of a run. `model` is the bare one, `forward` the one that is trained: in DDP, perhaps compiled;
    `evaluated` is for evaluations: without DDP, and compiled if the other is."""

    config: Config
    ranks: Ranks
    source: Source
    feed: Feed
    model: nn.Module
    forward: Any
    evaluated: Any
    parameters: tuple[nn.Parameter, ...]
    """The model's: to look for them in it at every step would take longer than to clip their gradients."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    numbers: precision.Numbers
    targets: int
    """As `counted.targets`."""
    watch: Stopwatch
    recorder: Recorder
    sink: Sink
    storage: Storage | None
    portions: Portions
    facts: dict[str, Any]
    agreement: Agreement
    guard: Guard
    replicas: Replicas
    profiler: Profiler
    monitor: Monitor
    heartbeat: Heartbeat
    """Of one process of each node."""
    saver: Saver | None = None
    resumed: Manifest | None = None
    state: dict[str, Any] = field(default_factory=lambda: dict(FRESH))
    began: float = field(default_factory=time.monotonic)
    pace: RateLimiter = field(default_factory=RateLimiter)

    @property
    def seconds(self) -> float:
        """Of training, over all starts of the run."""
        return float(self.state["seconds"]) + time.monotonic() - self.began

    @property
    def is_compiled(self) -> bool:
        """Whether passes are, so that one of another shape may have to be compiled again."""
        return any(one["what"] == "compile" and one["chosen"] != "false" for one in self.facts["choices"])

    @property
    def is_done(self) -> bool:
        """All steps, and the evaluation after the last one."""
        return self.state["step"] >= self.config.steps and not self.state["eval_due"]

    def no_sync(self) -> AbstractContextManager[None]:
        """In it a backward pass keeps its gradients to this rank."""
        wrapped = getattr(self.forward, "_orig_mod", self.forward)
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else fsdp.no_sync(self.model)


def setup(config: Config, ranks: Ranks, env: Mapping[str, str]) -> Run:
    """Raises, on all ranks alike, UsageError if config, data and processes don't go together, and OutOfMemoryError if
    not even one sample fits."""
    portions = memory.portions(config.batch_size, config.micro_batch_size, ranks.world)
    exact = deterministic(config.deterministic, ranks.device)
    numbers = precision.setup(config.precision, ranks.device)
    config = models.resolved(config)
    source = open_data(config, ranks)
    feed = Feed(source, share(config.batch_size, ranks.rank, ranks.world), ranks.device, config.loader)
    if not source.holds_out:
        config = config._replace(eval=config.eval._replace(every=0))
    storage = open_storage(env[contract.RUN_FOLDER]) if env.get(contract.RUN_FOLDER) else None
    torch.manual_seed(config.seed)
    model = models.build(config, source)
    flops = models.flops_per_sample(config, source, model)  # it can't be counted once the model is shared out
    shape = shaped(model, config, ranks, numbers)
    model, sharing = fsdp.placed(model, config, ranks, numbers, models.blocks(model))
    optimizer = optim.build(model, config.optimizer)
    beside = optim.held(optimizer, config.optimizer)
    portions = warmup.chosen(model, config, feed, ranks, portions, numbers, storage, beside)
    first = partial(first_pass, model, feed, portions.size, ranks, numbers)
    prepared = prepare(model, config, ranks, accumulates=portions.count > 1, first=first, storage=storage)
    watch = stopwatch(ranks.device)
    facts = _facts(config, ranks, source, model, numbers)
    how = (
        precision.explained(config.precision, numbers, ranks.device.type),
        *attention.explained(config, ranks.device.type),
    )
    built = optim.explained(optimizer, config.optimizer.fused, model)
    replicas = Replicas(ranks, shared_out=fsdp.is_sharded(model))
    beside_steps = feed.choice, portions.choice, *replicas.choices
    choices = (*how, built, *exact, *shape, *sharing, *prepared.choices, *beside_steps)
    facts["choices"] = [one._asdict() for one in choices]
    if ranks.rank == 0:
        _announce(facts, source, choices)
    sink = open_sink(env) if ranks.rank == 0 else Null()
    run = Run(
        config=config,
        ranks=ranks,
        source=source,
        feed=feed,
        model=model,
        forward=prepared.forward,
        evaluated=prepared.evaluated,
        parameters=tuple(model.parameters()),
        optimizer=optimizer,
        scaler=precision.scaler(numbers, ranks.device),
        numbers=numbers,
        targets=loss_normalization.targets(config, source),
        watch=watch,
        recorder=_recorder(config, ranks, source, flops, watch, portions.size, _peak(env, numbers, facts["device"])),
        sink=sink,
        storage=storage,
        portions=portions,
        facts=facts,
        agreement=Agreement(ranks),
        guard=Guard(config.non_finite, masked=loss_normalization.targets(config, source) > 0),
        replicas=replicas,
        profiler=open_profiler(config, ranks, env, sink, facts, accumulates=portions.count > 1),
        monitor=open_monitor(config.monitor, ranks, env, sink),
        heartbeat=Heartbeat({} if ranks.local_rank else env),
    )
    seed(config, ranks)
    return run


def seed(config: Config, ranks: Ranks, step: int = 0) -> None:
    """Set this rank's generators. `step` counts when the run goes on with another number of ranks."""
    drawn = [int(draw(config.seed, stream, ranks.rank + (step << 20), 1, 2**62)[0]) for stream in (DROPOUT, OWN)]
    torch.manual_seed(drawn[0])
    random.seed(drawn[1])
    np.random.seed(drawn[1] % 2**32)


def deterministic(asked: bool | None, device: torch.device) -> tuple[Choice, ...]:
    """Whether the same seed and the same ranks give the same bits: on CPUs, where it costs nothing, and where it is
    `asked` for. Where CUDA has no such kernel, torch warns once."""
    wanted = device.type == "cpu" if asked is None else asked
    if wanted and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = not wanted
    torch.set_deterministic_debug_mode("warn" if wanted else "default")  # the other function loads the compiler
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time only
    if asked is None and wanted:
        return ()
    why = "the spec says so" if asked is not None else "the same bits each time cost speed on a GPU"
    return (Choice("deterministic", str(wanted).lower(), why),)


def _recorder(
    config: Config, ranks: Ranks, source: Source, flops: float | None, watch: Stopwatch, micro: int, peak: float | None
) -> Recorder:
    return Recorder(
        ranks,
        watch,
        source.unit,
        units=config.batch_size * source.per_sample,
        flops=flops and flops * config.batch_size,
        peak=(peak and ranks.device.type == "cuda" and peak * ranks.world) or None,
        micro=micro,
    )


def _peak(env: Mapping[str, str], numbers: precision.Numbers, device: str) -> float | None:
    """Dense FLOP/s of one GPU in these numbers: as the request says, if it is the GPU that was asked for, or of a run
    that was started by hand by the trainer's own table. None: it is unknown."""
    known = peaks.asked(env[contract.GPU], device) if env.get(contract.GPU) else peaks.tflops(device)
    teraflops = known.get(numbers.name)
    return teraflops * 1e12 if teraflops else None


def _facts(
    config: Config, ranks: Ranks, source: Source, model: nn.Module, numbers: precision.Numbers
) -> dict[str, Any]:
    """What the start event says; the end event repeats it."""
    return {
        "config": as_data(config),
        **warmup.machine(ranks),
        "backend": ranks.backend,
        "precision": numbers.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "unigram_entropy": source.unigram_entropy,
        **source.facts,
    }


def _announce(facts: Mapping[str, Any], source: Source, choices: Sequence[Choice]) -> None:
    config = facts["config"]
    size = f", {si(facts['data_bytes'])} bytes" if "data_bytes" in facts else ""
    block = f" x {source.per_sample}" if source.per_sample > 1 else ""
    batch = f"{config['batch_size']}{block} {source.unit}"
    print(f"{config['model']['name']}: {facts['parameters']:,} parameters; {facts['data']}{size}")
    print(f"{facts['world_size']} x {facts['device']}, {facts['precision']}, global batch {batch}")
    print("\n".join(format_choices(choices)), flush=True)
