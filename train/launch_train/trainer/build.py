"""Build a run: data, model, optimizer, and everything else that the training loop uses."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
from launch_train.common.step_timer import Stopwatch, open_stopwatch
from launch_train.common.storage import Storage, open_storage
from launch_train.common.text import si
from launch_train.data import Source, open_data
from launch_train.data.loader import BatchLoader
from launch_train.data.sample_order import draw, share
from launch_train.distributed.consensus import Agreement
from launch_train.distributed.process_group import Ranks
from launch_train.monitoring.monitor import Monitor, open_monitor
from launch_train.performance import attention, fsdp, loss_normalization, precision
from launch_train.performance import micro_batch as memory
from launch_train.performance import optimizer as optim
from launch_train.performance.grad_guard import GradGuard
from launch_train.performance.micro_batch import MicroBatches
from launch_train.performance.prepare_model import apply_memory_settings, prepare
from launch_train.profiling.profiler import Profiler, open_profiler
from launch_train.telemetry.metric_sink import Sink, open_sink
from launch_train.trainer import warmup
from launch_train.trainer.metrics_buffer import Recorder
from launch_train.trainer.replica_check import ReplicaCheck
from launch_train.trainer.samples import Sampler, unless_unsupported
from launch_train.trainer.warmup import trial_pass

TORCH_STREAM, PYTHON_STREAM = 2, 3
"""Streams of random numbers: for torch, and for Python and NumPy. (launch_train.data.source uses 0 and 1.)"""

INITIAL_STATE: Mapping[str, Any] = MappingProxyType(
    {"step": 0, "samples": 0, "eval_loss": None, "eval_step": 0, "eval_due": False, "seconds": 0.0, "interruptions": 0}
    | {"micro_batch": 0}
)
"""The loop's state: steps done, samples drawn (the position in the data), the newest held-out loss and its step,
whether an evaluation is due, seconds of training before this start, number of interruptions, and the micro-batch that
the run was reduced to (0: never reduced)."""


@dataclass(frozen=True)
class Run:
    """The parts of a run.

    `model` is the bare model. `forward` is what the loop trains: the model in DDP, compiled if configured.
    `eval_forward` is for evaluations: without DDP, compiled if `forward` is.
    """

    config: Config
    ranks: Ranks
    source: Source
    batch_loader: BatchLoader
    model: nn.Module
    forward: Any
    eval_forward: Any
    parameters: tuple[nn.Parameter, ...]
    """Collected once: collecting them in each step would take longer than clipping their gradients."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    policy: precision.PrecisionPolicy
    countable_targets: int
    """As `loss_normalization.countable_targets`."""
    stopwatch: Stopwatch
    recorder: Recorder
    storage: Storage | None
    micro_batches: MicroBatches
    facts: dict[str, Any]
    agreement: Agreement
    sampler: Sampler
    guard: GradGuard
    replica_check: ReplicaCheck
    heartbeat: Heartbeat
    """Active in one process per node."""
    sink: Sink = field(default_factory=Sink)
    profiler: Profiler = field(default_factory=Profiler)
    monitor: Monitor = field(default_factory=Monitor)
    saver: Saver | None = None
    resumed: Manifest | None = None
    state: dict[str, Any] = field(default_factory=lambda: dict(INITIAL_STATE))
    started: float = field(default_factory=time.monotonic)
    pace: RateLimiter = field(default_factory=RateLimiter)

    @property
    def seconds(self) -> float:
        """Seconds of training, over all starts of the run."""
        return float(self.state["seconds"]) + time.monotonic() - self.started

    @property
    def is_compiled(self) -> bool:
        """True if the model is compiled, so that batches of another shape may have to be compiled again."""
        return any(choice["what"] == "compile" and choice["chosen"] != "false" for choice in self.facts["choices"])

    @property
    def is_done(self) -> bool:
        """True after all steps and the evaluation after the last one."""
        return self.state["step"] >= self.config.steps and not self.state["eval_due"]

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which a backward pass does not reduce its gradients over the ranks."""
        wrapped = getattr(self.forward, "_orig_mod", self.forward)
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else fsdp.no_sync(self.model)


def setup(config: Config, ranks: Ranks, env: Mapping[str, str]) -> Run:
    """Build the run and print its setup. Nothing is written before `open_outputs`.

    Raises, on all ranks: UsageError if config, data and processes don't fit together; OutOfMemoryError if not even one
    sample fits.
    """
    micro_batches = memory.split_evenly(config.batch_size, config.micro_batch_size, ranks.world)
    determinism = set_deterministic(config.deterministic, ranks.device)
    policy = precision.setup(config.precision, ranks.device)
    config = models.resolve_task(config)
    source = open_data(config, ranks)
    batch_loader = BatchLoader(source, share(config.batch_size, ranks.rank, ranks.world), ranks.device, config.loader)
    if not source.holds_out:
        config = config._replace(eval=config.eval._replace(every=0))
    config, sample_choices = unless_unsupported(config)
    storage = open_storage(env[contract.RUN_FOLDER]) if env.get(contract.RUN_FOLDER) else None
    torch.manual_seed(config.seed)
    model = models.build_model(config, source)
    flops = models.flops_per_sample(config, source, model)  # before sharding: a sharded model can't be counted
    memory_choices = apply_memory_settings(model, config, ranks, policy)
    model, sharding_choices = fsdp.place_model(model, config, ranks, policy, models.blocks(model))
    optimizer = optim.build_optimizer(model, config.optimizer)
    optimizer_size = optim.numbers_per_parameter(optimizer, config.optimizer)
    micro_batches = warmup.choose_micro_batch(
        model, config, batch_loader, ranks, micro_batches, policy, storage, optimizer_size
    )
    try_pass = partial(trial_pass, model, batch_loader, micro_batches.size, ranks, policy)
    accumulates = micro_batches.count > 1
    prepared = prepare(model, config, ranks, accumulates=accumulates, trial_pass=try_pass, storage=storage)
    micro_batches.graphed = ("cuda graphs", "true") in {choice[:2] for choice in prepared.choices}
    watch, countable_targets = open_stopwatch(ranks.device), loss_normalization.countable_targets(config, source)
    facts = {  # of the start event; the end event repeats them
        "config": as_data(config),
        **warmup.device_facts(ranks),
        "backend": ranks.backend,
        "precision": policy.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "unigram_entropy": source.unigram_entropy,
        **source.facts,
    }
    replica_check = ReplicaCheck(ranks, sharded=fsdp.has_shards(model))
    choices = (
        precision.choice(config.precision, policy, ranks.device.type),
        *attention.choices(config, ranks.device.type),
        optim.choice(optimizer, config.optimizer.fused, model),
        *determinism,
        *memory_choices,
        *sharding_choices,
        *prepared.choices,
        batch_loader.choice,
        micro_batches.choice,
        *replica_check.choices,
        *sample_choices,
    )
    facts["choices"] = [choice._asdict() for choice in choices]
    if ranks.rank == 0:
        _print_setup(facts, source, choices)
    run = Run(
        config=config,
        ranks=ranks,
        source=source,
        batch_loader=batch_loader,
        model=model,
        forward=prepared.forward,
        eval_forward=prepared.eval_forward,
        parameters=tuple(model.parameters()),
        optimizer=optimizer,
        scaler=precision.scaler(policy, ranks.device),
        policy=policy,
        countable_targets=countable_targets,
        stopwatch=watch,
        recorder=Recorder(
            ranks,
            watch,
            source.unit,
            units=config.batch_size * source.per_sample,
            flops=flops and flops * config.batch_size,
            peak_flops=_peak_flops(env, policy, facts["device"], ranks),
            micro_batch=micro_batches.size,
        ),
        storage=storage,
        micro_batches=micro_batches,
        facts=facts,
        agreement=Agreement(ranks),
        sampler=Sampler(config, source, policy, ranks.device),
        guard=GradGuard(config.non_finite, masked=countable_targets > 0),
        replica_check=replica_check,
        heartbeat=Heartbeat({} if ranks.local_rank else env),
    )
    seed(config, ranks)
    return run


def open_outputs(run: Run, env: Mapping[str, str]) -> Run:
    """Return the run with its sink, profiler and monitor open. Raises OutputError."""
    sink = open_sink(env, run.config.loggers) if run.ranks.rank == 0 else Sink()
    accumulates = run.micro_batches.count > 1
    profiler = open_profiler(run.config, run.ranks, env, sink, run.facts, accumulates=accumulates)
    ranks = run.ranks
    monitor = open_monitor(run.config.monitor, env, sink, rank=ranks.rank, local_rank=ranks.local_rank)
    return replace(run, sink=sink, profiler=profiler, monitor=monitor)


def seed(config: Config, ranks: Ranks, step: int = 0) -> None:
    """Seed this rank's random generators. `step`: the step that a run with another number of ranks resumes from."""
    counter = ranks.rank + (step << 20)
    torch.manual_seed(int(draw(config.seed, TORCH_STREAM, counter, 1, 2**62)[0]))
    python_seed = int(draw(config.seed, PYTHON_STREAM, counter, 1, 2**62)[0])
    random.seed(python_seed)
    np.random.seed(python_seed % 2**32)


def set_deterministic(configured: bool | None, device: torch.device) -> tuple[Choice, ...]:
    """Turn deterministic algorithms on (the same seed and ranks then give the same bits) or off.

    On as configured; by default on CPUs only, where they cost nothing. torch warns once about a CUDA operator that has
    no deterministic kernel.
    """
    enabled = device.type == "cpu" if configured is None else configured
    if enabled and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = not enabled
    # torch.use_deterministic_algorithms would import the compiler.
    torch.set_deterministic_debug_mode("warn" if enabled else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time only
    if configured is None and enabled:
        return ()
    why = "set in the spec" if configured is not None else "faster on a GPU; set deterministic: true to change it"
    return (Choice("deterministic", str(enabled).lower(), why),)


def _peak_flops(env: Mapping[str, str], policy: precision.PrecisionPolicy, device: str, ranks: Ranks) -> float | None:
    """Return the dense FLOP/s of all GPUs together at this precision, or None if unknown.

    The figure comes from the job request if this is the requested GPU, and from the trainer's own table for a run that
    was started by hand.
    """
    known = peaks.requested(env[contract.GPU], device) if env.get(contract.GPU) else peaks.tflops(device)
    teraflops = known.get(policy.name) if ranks.device.type == "cuda" else None
    return teraflops * 1e12 * ranks.world if teraflops else None


def _print_setup(facts: Mapping[str, Any], source: Source, choices: Sequence[Choice]) -> None:
    config = facts["config"]
    size = f", {si(facts['data_bytes'])} bytes" if "data_bytes" in facts else ""
    block = f" x {source.per_sample}" if source.per_sample > 1 else ""
    batch = f"{config['batch_size']}{block} {source.unit}"
    print(f"{config['model']['name']}: {facts['parameters']:,} parameters; {facts['data']}{size}")
    print(f"{facts['world_size']} x {facts['device']}, {facts['precision']}, global batch {batch}")
    switches = {"true": "on", "false": "off"}  # the run folder has the setting's value
    shown = (choice._replace(chosen=switches.get(choice.chosen, choice.chosen)) for choice in choices)
    print("\n".join(format_choices(shown)), flush=True)
