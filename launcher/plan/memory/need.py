"""The memory of one GPU in a training run, by part, and the largest micro-batch that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from launch_train.common.config import PRESETS, Checkpointing, Config, parse
from launcher.catalog import Gpu
from launcher.errors import UsageError
from launcher.plan.memory.sizes import ModelSizes, sizes_of

CONTEXT = 600_000_000
"""Bytes of CUDA's context and its libraries' workspaces. Assumed."""
NCCL = 500_000_000
"""Bytes of NCCL's buffers with more than one GPU. Assumed."""
FRAGMENTATION = 0.05
"""Share of torch's tensors that its allocator can't use. Assumed."""
MAX_FILL = 0.9
"""Share of the memory that the trainer fills when it chooses the micro-batch
(launch_train.performance.micro_batch.MAX_FILL)."""
TOLERANCE = 0.1
"""Error of the formulas for activations and logits against a tracker, in the tests."""
DEFERRED = 0.1
"""Largest share of the memory that FSDP's unsharded gradients may take (launch_train.performance.fsdp)."""
GIB = 2**30
GB = 10**9


class Setup(Struct, frozen=True):
    """Where and how a model trains, as far as its memory depends on it.

    `memory_gb` is the GPU's as sold: a card has 0.92 to 0.995 of that in GiB, which is 0.98 to 1.07 of it in GB.
    `limit_bytes`: machine.gpu_memory_gb. `share`: samples of a step on one GPU. `micro_batch`: set in the spec, or
    None. `numbers`: those that the optimizer keeps for each parameter; `step_numbers`: those of a step besides.
    `compiles`: the trainer compiles the model.
    """

    memory_gb: float
    world: int
    share: int
    half: bool
    compiles: bool
    checkpointing: Checkpointing = "none"
    sharded: bool = False
    micro_batch: int | None = None
    numbers: int = 2
    step_numbers: int = 0
    limit_bytes: int | None = None

    @property
    def fills(self) -> float:
        """Return the share of the memory that may be filled."""
        return MAX_FILL if self.micro_batch is None else 1.0

    @property
    def available(self) -> int:
        """Return the bytes that a run may fill, at least."""
        return int(min(self.memory_gb * GB, self.limit_bytes or float("inf")) * self.fills)

    @property
    def available_at_most(self) -> int:
        """Return the bytes that a run may fill on a card that has all the memory that it is sold with, in GiB."""
        return int(min(self.memory_gb * GIB, self.limit_bytes or float("inf")) * self.fills)


class MemoryItem(Struct, frozen=True):
    """A part of the memory, in bytes. `what` is its name in a table."""

    name: str
    size: int
    what: str


class Need(Struct, frozen=True):
    """The peak of one GPU at a micro-batch."""

    micro_batch: int
    parts: tuple[MemoryItem, ...]
    sure: int
    """Bytes that the run needs at least."""

    @property
    def total(self) -> int:
        """Return the peak in bytes."""
        return sum(part.size for part in self.parts)

    @property
    def largest(self) -> MemoryItem:
        return max(self.parts, key=lambda part: part.size)


def memory_setup(config: Config, gpu: Gpu, *, world: int, memory_gb: float, limit_gb: float | None = None) -> Setup:
    """Return the setup that the trainer would choose on a GPU (launch_train.performance)."""
    optimizer = config.optimizer
    sharded = config.parallel == "fsdp" and world > 1
    moments = 2 if optimizer.name == "adamw" else int(optimizer.momentum > 0)
    unfused = optimizer.fused is False or (optimizer.name == "sgd" and sharded)
    new = gpu.sm >= 8
    return Setup(
        memory_gb=memory_gb,
        world=world,
        share=-(-config.batch_size // world),
        half=config.precision in ("bf16", "fp16") or (config.precision == "auto" and gpu.sm >= 7),
        compiles=new if config.compile is None else bool(config.compile),
        checkpointing=config.activation_checkpointing,
        sharded=sharded,
        micro_batch=config.micro_batch_size,
        numbers=moments,
        step_numbers=moments + 2 if unfused else 0,
        limit_bytes=int(limit_gb * GIB) if limit_gb else None,
    )


def need(model: ModelSizes, setup: Setup, micro_batch: int) -> Need:
    """Return the memory of one GPU by part."""
    parts = [*tensors(model, setup, micro_batch)]
    torchs = sum(part.size for part in parts)
    parts += [
        MemoryItem("fragmentation", int(FRAGMENTATION * torchs), f"{100 * FRAGMENTATION:.0f} % of the above; assumed"),
        MemoryItem("CUDA", CONTEXT + (NCCL if setup.world > 1 else 0), "its context, libraries and NCCL; assumed"),
    ]
    return Need(micro_batch, tuple(parts), at_least(model, setup, micro_batch))


def tensors(model: ModelSizes, setup: Setup, micro_batch: int) -> Iterator[MemoryItem]:
    """Yield the parts that torch allocates. Their sum is the peak of a step.

    `start`: when the backward pass begins, all activations exist, or those of a block that is computed again. `end`:
    when it ends, all gradients do. With several micro-batches, DDP or FSDP all gradients exist throughout; otherwise
    the last row says what does not exist at the same time.
    """
    size = 4 * model.parameters
    shard = -(-size // setup.world) if setup.sharded else size
    saved = model.saved(half=setup.half)
    kept = {"none": saved.blocks, "selective": saved.operators, "full": saved.entries}[setup.checkpointing]
    again = max(0, saved.block - kept // saved.repeats)  # of a block, computed again in its backward pass
    in_half = 2 * model.matrices if setup.half and not setup.sharded else 0
    scores = logits(model, setup, micro_batch)
    start = max((kept + saved.outside) * micro_batch + scores, (kept + again + saved.work) * micro_batch + early(model))
    end = (saved.block + saved.work) * micro_batch
    keeps_gradients = setup.world > 1 or micro_batch < setup.share
    peak = shard + start + in_half if keeps_gradients else max(start + in_half, shard + end)
    yield MemoryItem("weights", shard, f"fp32; 1/{setup.world} on each GPU" if setup.sharded else "fp32")
    yield MemoryItem("gradients", shard, "fp32")
    yield MemoryItem("optimizer", shard * setup.numbers, f"{setup.numbers} numbers for each parameter, fp32")
    yield MemoryItem("activations", start - scores, f"activation_checkpointing: {setup.checkpointing}")
    yield MemoryItem("logits", scores, "with the loss and their gradients")
    if in_half:
        yield MemoryItem("copies", in_half, "weights in half precision (autocast)")
    if setup.sharded:
        yield MemoryItem("gathered", gathered(model, setup, micro_batch), "parameters of blocks in use (FSDP)")
    elif setup.world > 1:
        yield MemoryItem("buckets", size, "of DDP, while it rebuilds them")
    if (update := shard + shard * setup.step_numbers - peak) > 0:
        yield MemoryItem("update", update, "copies that an unfused optimizer makes")
    if (overlap := peak - shard - start - in_half) < 0:
        yield MemoryItem("overlap", overlap, "activations are freed as gradients appear")


def early(model: ModelSizes) -> int:
    """Return the bytes of the output layer's gradient, which is there before those of the blocks."""
    return 4 * model.head


def logits(model: ModelSizes, setup: Setup, micro_batch: int) -> int:
    """Return the bytes of the logits at their peak, with eager code: the log-softmax, its gradient, and the logits'
    gradient, all in fp32; or the last one with the gradient of the output layer."""
    numbers = model.logits * micro_batch
    item = 2 if setup.half else 4
    return max(12 * numbers, item * numbers + (4 + item * setup.half) * model.head)


def gathered(model: ModelSizes, setup: Setup, micro_batch: int) -> int:
    """Return the bytes that FSDP holds besides the shards: the root's parameters, those of a block and of the next one,
    the gradients of the larger of both before they are reduced, and all of them if the last micro-batch reduces them
    (launch_train.performance.fsdp)."""
    item = 2 if setup.half else 4
    in_use = item * (model.root + 2 * model.block) + (4 + item) * max(model.root, model.block)
    deferred = micro_batch < setup.share and 4 * model.parameters <= DEFERRED * setup.memory_gb * GB
    return in_use + (4 * model.parameters if deferred else 0)


def at_least(model: ModelSizes, setup: Setup, micro_batch: int) -> int:
    """Return the bytes that a run needs whatever the error of the formulas: weights, gradients and moments, and the
    activations less the tolerance, without what is assumed. Compiled code keeps at least half of the activations, and
    no logits in fp32."""
    exact, estimated = 0, 0.0
    counted = {"weights", "gradients", "optimizer", "overlap", "update"}
    if setup.micro_batch is None:
        counted.add("buckets")  # the trainer keeps them free when it chooses the micro-batch
    for part in tensors(model, setup, micro_batch):
        if part.name in counted:
            exact += part.size
        elif part.name == "buckets":
            continue
        elif not setup.compiles:
            estimated += part.size
        elif part.name != "copies":
            estimated += part.size / (3 if part.name == "logits" else 2)
    return int(exact + estimated * (1 - TOLERANCE))


# --- The micro-batch ------------------------------------------------------------------------------------------------


def largest_micro_batch(model: ModelSizes, setup: Setup) -> int | None:
    """Return the largest divisor of a GPU's share that fits, or None if not even one sample does."""
    fitting = [size for size in divisors(setup.share) if need(model, setup, size).total <= setup.available]
    return max(fitting, default=None)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# --- The largest model for an amount of memory ------------------------------------------------------------------------

UNITS = {"": GB, "gb": GB, "g": GB, "gib": GIB, "gi": GIB, "mb": 10**6, "mib": 2**20, "tb": 10**12}
ACTIVATIONS = 0.1
"""Share left for activations, or for the keys and values of earlier tokens. Assumed: one short sample."""
USES = {
    "inference, bf16": (2.0, "weights"),
    "inference, fp32": (4.0, "weights"),
    "LoRA, bf16": (2.16, "weights, and adapters of 1 % of them at 16 bytes each"),
    "AdamW, fp32": (16.0, "weights, gradients and two moments"),
    "AdamW, bf16 autocast": (18.0, "weights, gradients, two moments and bf16 weights"),
}
"""Bytes for each parameter."""


class Largest(NamedTuple):
    """The most parameters for a use, and the largest built-in model within them (empty: none)."""

    use: str
    bytes_per_parameter: float
    what: str
    parameters: int
    model: str


def memory_bytes(text: str) -> int:
    """Return the bytes of `24GB`, `24` or `80 GiB`. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not float(match[1]):
        raise UsageError(f"--vram: invalid amount of memory {text!r}", "Use for example --vram 24GB.")
    return int(float(match[1]) * unit)


def largest_models(memory: int) -> list[Largest]:
    """Return the largest model for each use, with one GPU of that many bytes."""
    usable = max(0.0, (memory - CONTEXT) / (1 + FRAGMENTATION) * (1 - ACTIVATIONS))
    known = sorted((sizes.parameters, name) for name in PRESETS if (sizes := sizes_of(parse({"model": name}))))
    rows = []
    for use, (each, what) in USES.items():
        most = int(usable / each)
        name = max(((size, name) for size, name in known if size <= most), default=(0, ""))[1]
        rows.append(Largest(use, each, what, most, name))
    return rows
