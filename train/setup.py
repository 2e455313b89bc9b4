"""Everything that a run needs before its first step."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train import contract, metrics, models, optim, precision
from train.agreement import Agreement
from train.checkpoint import Manifest
from train.config import Config, Gpt, as_data
from train.data import Source, open_data
from train.data.source import draw, share
from train.dist import Ranks
from train.errors import UsageError
from train.progress import Pace, si
from train.recorder import Recorder
from train.saver import Saver
from train.storage import Storage, open_storage
from train.timing import Stopwatch, stopwatch

DROPOUT, OWN = 2, 3
"""Streams of random numbers (train.data.source has 0 and 1): torch's, and Python's and NumPy's for who uses them."""

FRESH: Mapping[str, Any] = MappingProxyType(
    {"step": 0, "samples": 0, "eval_loss": None, "eval_due": False, "seconds": 0.0, "interruptions": 0}
)
"""The loop's own state: steps done, samples drawn (the position in the data), the newest held-out loss and whether one
is due, seconds of training before this start, and how often the run was interrupted."""


@dataclass(frozen=True)
class Run:
    """The parts of a run. `model` is the bare one, `forward` the one that is trained: in DDP, perhaps compiled."""

    config: Config
    ranks: Ranks
    source: Source
    model: nn.Module
    forward: Any
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    numbers: precision.Numbers
    watch: Stopwatch
    recorder: Recorder
    sink: metrics.Sink
    storage: Storage | None
    share: slice
    micro_batch: int
    facts: dict[str, Any]
    agreement: Agreement
    saver: Saver | None = None
    resumed: Manifest | None = None
    state: dict[str, Any] = field(default_factory=lambda: dict(FRESH))
    began: float = field(default_factory=time.monotonic)
    pace: Pace = field(default_factory=Pace)

    @property
    def seconds(self) -> float:
        """Of training, over all starts of the run."""
        return float(self.state["seconds"]) + time.monotonic() - self.began

    def no_sync(self) -> AbstractContextManager[None]:
        """In it a backward pass keeps its gradients to this rank."""
        wrapped = getattr(self.forward, "_orig_mod", self.forward)
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) else nullcontext()


def setup(config: Config, ranks: Ranks, env: Mapping[str, str]) -> Run:
    """Raises UsageError, on all ranks alike, if config, data and processes don't go together."""
    micro_batch = micro_batch_size(config, ranks.world)
    deterministic(ranks.device)
    numbers = precision.setup(config.precision, ranks.device)
    source = open_data(config, ranks)
    torch.manual_seed(config.seed)
    model = models.build(config.model).to(ranks.device)
    watch = stopwatch(ranks.device)
    facts = _facts(config, ranks, source, model, numbers)
    recorder = _recorder(config, ranks, source, model, watch, _peak(env, numbers, facts["device"]))
    if ranks.rank == 0:
        _announce(config, facts, source.unit)
    run = Run(
        config=config,
        ranks=ranks,
        source=source,
        model=model,
        forward=_wrapped(model, config, ranks, micro_batch),
        optimizer=optim.build(model, config.optimizer),
        scaler=precision.scaler(numbers, ranks.device),
        numbers=numbers,
        watch=watch,
        recorder=recorder,
        sink=metrics.open_sink(env) if ranks.rank == 0 else metrics.Null(),
        storage=open_storage(env[contract.RUN_FOLDER]) if env.get(contract.RUN_FOLDER) else None,
        share=share(config.batch_size, ranks.rank, ranks.world),
        micro_batch=micro_batch,
        facts=facts,
        agreement=Agreement(ranks),
    )
    seed(config, ranks)
    return run


def seed(config: Config, ranks: Ranks, step: int = 0) -> None:
    """Set this rank's generators. `step` counts when the run goes on with another number of ranks."""
    drawn = [int(draw(config.seed, stream, ranks.rank + (step << 20), 1, 2**62)[0]) for stream in (DROPOUT, OWN)]
    torch.manual_seed(drawn[0])
    random.seed(drawn[1])
    np.random.seed(drawn[1] % 2**32)


def micro_batch_size(config: Config, world: int) -> int:
    """Samples of one forward pass on one rank. Raises UsageError if the global batch can't be shared evenly."""
    if config.batch_size % world:
        near = max(world, round(config.batch_size / world) * world)
        raise UsageError(f"batch_size {config.batch_size} can't be shared by {world} processes evenly; {near} can")
    mine = config.batch_size // world
    micro = config.micro_batch_size or mine
    if mine % micro:
        raise UsageError(f"micro_batch_size {micro} doesn't divide the {mine} samples that each of {world} ranks has")
    return micro


def deterministic(device: torch.device) -> None:
    """The same seed and the same ranks give the same bits. Where CUDA has no such kernel, torch warns once."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time only


def _wrapped(model: nn.Module, config: Config, ranks: Ranks, micro_batch: int) -> nn.Module:
    """DDP around the model where there are several ranks, and the compiler around both: it then splits the backward
    pass at DDP's buckets, so that they travel while it goes on."""
    compiled = _compiles(config, ranks)
    wrapped = model
    if ranks.world > 1:
        # A static graph holds when each backward pass is like the last, which accumulation's no_sync is not.
        static = not compiled and config.batch_size // ranks.world == micro_batch
        ids = [ranks.device.index] if ranks.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, static_graph=static)
    return cast(nn.Module, torch.compile(wrapped)) if compiled else wrapped


def _compiles(config: Config, ranks: Ranks) -> bool:
    """auto: on Ampere GPUs and later, if there is a C compiler, which Triton needs. On the CPU it costs more than a
    short run gains."""
    if config.compile is not None:
        return config.compile
    if ranks.device.type != "cuda" or torch.cuda.get_device_capability(ranks.device) < (8, 0):
        return False
    found = any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang")))
    if not found and ranks.rank == 0:
        print("compile: auto is off, as there is no C compiler (cc, gcc or clang) on this machine", flush=True)
    return found


def _recorder(
    config: Config, ranks: Ranks, source: Source, model: nn.Module, watch: Stopwatch, peak: float | None
) -> Recorder:
    flops = models.flops_per_sample(config.model, model)
    return Recorder(
        ranks,
        watch,
        source.unit,
        units=config.batch_size * source.per_sample,
        flops=flops and flops * config.batch_size,
        peak=(peak and ranks.device.type == "cuda" and peak * ranks.world) or None,
    )


def _peak(env: Mapping[str, str], numbers: precision.Numbers, device: str) -> float | None:
    """Dense FLOP/s of one GPU in these numbers, as the request says; None if it doesn't know, or if `device` is another
    GPU than the one that was asked for."""
    asked = json.loads(env.get(contract.GPU) or "{}")
    teraflops = (asked.get("peak_tflops") or {}).get(numbers.name)
    return teraflops * 1e12 if teraflops and _is_gpu(str(asked.get("name") or ""), device) else None


def _is_gpu(asked: str, device: str) -> bool:
    """Whether CUDA's name of a device, "NVIDIA H100 80GB HBM3" or "Tesla T4", is that of "NVIDIA H100 80GB Mega"."""
    model, words = (re.findall(r"[A-Z0-9]+", name.upper()) for name in (asked, device))
    model = [word for word in model if word not in _NO_MODEL and not re.fullmatch(r"\d+GB", word)]
    return bool(model) and set(model) <= set(words)


_NO_MODEL = frozenset({"NVIDIA", "TESLA", "MEGA"})


def _facts(
    config: Config, ranks: Ranks, source: Source, model: nn.Module, numbers: precision.Numbers
) -> dict[str, Any]:
    """What the start event says; the end event repeats it."""
    return {
        "config": as_data(config),
        "world_size": ranks.world,
        "backend": ranks.backend,
        "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
        "precision": numbers.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "unigram_entropy": source.unigram_entropy,
        **source.facts,
    }


def _announce(config: Config, facts: Mapping[str, Any], unit: str) -> None:
    size = f", {si(facts['data_bytes'])} bytes" if "data_bytes" in facts else ""
    block = f" x {config.model.block_size}" if isinstance(config.model, Gpt) else ""
    batch = f"{config.batch_size}{block} {unit}"
    print(f"{config.model.name}: {facts['parameters']:,} parameters; {facts['data']}{size}")
    print(f"{facts['world_size']} x {facts['device']}, {facts['precision']}, global batch {batch}")
    print(end="", flush=True)
