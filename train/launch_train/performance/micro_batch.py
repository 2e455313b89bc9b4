"""Micro-batch size: the largest that fits, probed before training, and halved if memory runs out later."""

from __future__ import annotations

import gc
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import nn

from launch_train.common.decisions import Choice
from launch_train.common.errors import OutOfMemoryError, UsageError
from launch_train.common.storage import OutputError, Storage
from launch_train.distributed import dtensor
from launch_train.distributed.process_group import Ranks, barrier
from launch_train.performance import fsdp

MAX_FILL = 0.9
"""Share of a GPU's memory that a probe may fill. The rest is for NCCL, the compiler and fragmentation."""

OUT_OF_MEMORY = re.compile(
    r"\bout of memory\b|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w*ALLOC\w*_FAILED|NOT_INITIALIZED)"
)
"""Errors of CUDA and its libraries if torch holds all the memory: they can't load kernels or allocate workspaces and
handles (cuBLAS then reports NOT_INITIALIZED). Triton and NCCL pass CUDA's messages on."""


class MicroBatches:
    """This rank's share of a global batch, split into micro-batches.

    All ranks start training with the same size. A rank that runs out of memory later halves its own.
    """

    def __init__(self, share: int, size: int, choice: Choice) -> None:
        """`share`: samples per step on this rank; `size`: samples per micro-batch."""
        self.share, self.size, self.choice = share, size, choice
        self.graphed = False
        """True with CUDA graphs: a second pass of a step would overwrite the gradients of the first, so the size stays
        (https://github.com/pytorch/pytorch/issues/169545)."""

    @property
    def count(self) -> int:
        return -(-self.share // self.size)

    def at_most(self, size: int, why: str) -> MicroBatches:
        """Return the split into the largest micro-batches of up to `size` samples."""
        largest = max(divisor for divisor in divisors(self.share) if divisor <= size)
        return MicroBatches(self.share, largest, Choice("micro-batch", str(largest), why))

    @property
    def half(self) -> int:
        """The largest divisor of the share up to half the size; 0 if there is none."""
        return max((size for size in divisors(self.share) if size <= self.size // 2), default=0)

    def halve(self) -> bool:
        """Reduce the size to half or less, a divisor of the share. Return False if it can't be reduced."""
        reducible = bool(self.half) and not self.graphed
        self.size = self.half if reducible else self.size
        return reducible


def split_evenly(batch_size: int, micro_batch_size: int | None, world: int) -> MicroBatches:
    """Return the micro-batches set in the spec (`micro_batch_size`). For auto (None): one, until `probe` finds less.

    Raises UsageError if the global batch can't be divided evenly.
    """
    if batch_size % world:
        near = max(world, round(batch_size / world) * world)
        raise UsageError(f"batch_size {batch_size} is not a multiple of {world} processes; use for example {near}")
    share = batch_size // world
    if micro_batch_size is None:
        return MicroBatches(share, share, Choice("micro-batch", str(share), "the rank's whole share"))
    if share % micro_batch_size:
        raise UsageError(
            f"micro_batch_size {micro_batch_size} doesn't divide the {share} samples of each of {world} ranks; "
            "use a divisor or auto"
        )
    return MicroBatches(share, micro_batch_size, Choice("micro-batch", str(micro_batch_size), "set in the spec"))


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def largest_that_fits(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending `sizes` that fits, or None. The largest is tried first: most runs fit."""
    if fits(sizes[-1]):
        return sizes[-1]
    below = bisect_left(sizes[:-1], True, key=lambda size: not fits(size))
    return sizes[below - 1] if below else None


def largest_near(sizes: list[int], start: int | None, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending `sizes` that fits, searching from `start` upwards, then downwards, as each try is
    expensive. `start` None: from the smallest."""
    index = -1 if start is None else sizes.index(start)
    largest = None
    for size in takewhile(fits, sizes[index + 1 :]):
        largest = size
    return largest or next(filter(fits, reversed(sizes[: index + 1])), None)


def probe(
    ranks: Ranks,
    share: int,
    attempt: Callable[[int], None],
    reserved: int,
    compiled: Callable[[int], None] | None = None,
) -> MicroBatches:
    """Return the largest micro-batch that fits into memory on all ranks. Collective.

    `attempt` runs a forward and a backward pass with that many samples. `compiled`, if given, does so with the compiled
    model; each try takes longer, so sizes near the result of `attempt` are tried. `reserved`: bytes to keep free for
    what training will hold besides.

    Raises OutOfMemoryError on all ranks if not even one sample fits.
    """
    tried: list[int] = []

    def fits(run_passes: Callable[[int], None], size: int) -> bool:
        tried.append(size)
        fits_here = fits_in_memory(ranks.device, lambda: run_passes(size), reserved)
        barrier(ranks)  # a rank may prepare its first batch, or compile, for longer than a collective's timeout
        return true_on_all_ranks(ranks, fits_here)

    sizes = divisors(share)
    with memory_limit(ranks.device):
        size = largest_that_fits(sizes, partial(fits, attempt))
        if compiled:
            size = largest_near(sizes, size, partial(fits, compiled)) or size
    if size is None:
        raise OutOfMemoryError(
            f"not even one sample fits into the memory of this device ({memory_text(ranks.device)}): use a smaller "
            "model or block_size, activation_checkpointing: full, or parallel: fsdp"
        )
    why = f"largest of {len(tried)} tried that fits into {memory_text(ranks.device)}"
    return MicroBatches(share, size, Choice("micro-batch", str(size), why))


def is_memory_bounded(device: torch.device) -> bool:
    """Return whether running out of memory raises an error. A host overcommits until the kernel kills the process."""
    return device.type == "cuda"


def fits_in_memory(device: torch.device, attempt: Callable[[], None], reserved: int) -> bool:
    """Return whether `attempt` succeeds while `reserved` bytes of the device's memory are allocated."""
    try:
        with unify_out_of_memory():
            reserve = torch.empty(reserved, dtype=torch.uint8, device=device)
            try:
                attempt()
            finally:
                del reserve
    except torch.OutOfMemoryError:
        return False
    finally:
        free_memory(device)
    return True


@contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """Limit torch's tensors to MAX_FILL of the GPU, minus what CUDA, NCCL and other processes have taken; beyond it an
    allocation fails as on a full GPU.

    Filling the rest with a tensor would not do: in the first pass CUDA, cuBLAS and cuDNN allocate from that rest.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    taken_by_others = (total - free - reserved) / total
    fraction = min(MAX_FILL * before, max(0.0, MAX_FILL - taken_by_others))  # a limit may be set already
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.reset_peak_memory_stats(device)  # the rows report the peak of training only


def free_memory(device: torch.device) -> None:
    """Release unused memory. Call it outside of an exception handler: a traceback holds the tensors of its frames."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def true_on_all_ranks(ranks: Ranks, value: bool) -> bool:
    if ranks.world == 1:
        return value
    flag = torch.tensor([int(value)], device=ranks.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def bytes_to_reserve(model: nn.Module, optimizer_size: int, *, buckets: bool) -> int:
    """Return the bytes that training will hold besides the model, its gradients and its activations.

    `optimizer_size`: numbers that the optimizer keeps per parameter. `buckets`: DDP copies the gradients to buckets,
    which it allocates again after the first step.
    """
    shards = [dtensor.local_part(p) for p in model.parameters() if p.requires_grad]
    return sum(p.numel() * p.element_size() for p in shards) * (optimizer_size + buckets)


def memory_text(device: torch.device) -> str:
    """Return the device's memory as text: `79.2 GB`, or `the host's memory`."""
    if device.type != "cuda":
        return "the host's memory"
    return f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.1f} GB"


# --- Out of memory during training ------------------------------------------------------------------------------------

LIMIT_FILE = "micro_batch.json"
"""In the run folder: the smallest micro-batch that a rank of the run had to reduce to (JSON: size)."""

MAX_TRIES = 64
"""Attempts to write the file while other ranks write it: more than the ranks of a large run."""


def load_limit(storage: Storage | None) -> int | None:
    """Return the micro-batch size that an earlier start was reduced to, or None."""
    return _read_limit(storage)[0] if storage is not None else None


def lower_limit(storage: Storage | None, size: int) -> None:
    """Store `size` as the limit of later starts, unless a lower one is stored. Write errors are ignored."""
    if storage is None:
        return
    with suppress(OutputError):
        for _ in range(MAX_TRIES):
            limit, version = _read_limit(storage)
            if limit is not None and limit <= size:
                return
            with suppress(FileExistsError):  # another rank wrote at the same time
                storage.swap(LIMIT_FILE, json.dumps({"size": size}).encode(), version)
                return


def _read_limit(storage: Storage) -> tuple[int | None, str]:
    """Return the stored size (None if damaged or missing) and its version."""
    try:
        content, version = storage.read_version(LIMIT_FILE)
    except FileNotFoundError:
        return None, ""
    try:
        size = json.loads(content)["size"]
    except (ValueError, KeyError, TypeError):
        return None, version
    return size if isinstance(size, int) and size > 0 else None, version


def halve_for_retry(micro_batches: MicroBatches, model: nn.Module, ranks: Ranks) -> bool:
    """Halve the micro-batch after a step ran out of memory. Return whether this rank can retry the step while its peers
    wait in their all-reduce.

    It can't if it has peers and the model has buffers (DDP broadcasts them in a step's first forward pass, which the
    peers have finished) or is sharded (the peers wait for its shards).
    """
    can_retry_alone = ranks.world == 1 or not (fsdp.has_shards(model) or any(True for _ in model.buffers()))
    return micro_batches.halve() and can_retry_alone


@contextmanager
def explain_out_of_memory(ranks: Ranks) -> Iterator[None]:
    """Inside, turn torch's out-of-memory errors into our OutOfMemoryError, which says what to change."""
    try:
        with unify_out_of_memory():
            yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0][:160]
        raise OutOfMemoryError(
            f"rank {ranks.rank} is out of memory: {reason}: use a smaller model, micro_batch_size or block_size, "
            "activation_checkpointing: full, or parallel: fsdp"
        ) from error


@contextmanager
def unify_out_of_memory() -> Iterator[None]:
    """Inside, raise torch.OutOfMemoryError for CUDA libraries too; torch raises it for its own tensors only."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not OUT_OF_MEMORY.search(str(error)):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def out_of_memory_error(micro_batches: MicroBatches, before: int, ranks: Ranks) -> OutOfMemoryError:
    """Return the error that ends this process, whose micro-batch was `before` and will be smaller in the next start."""
    size, half = micro_batches.size, micro_batches.half
    if micro_batches.graphed and half:
        return OutOfMemoryError(
            f"rank {ranks.rank} is out of memory with micro_batch_size {before}, and cuda_graphs: true allows no "
            "smaller ones: a CUDA graph overwrites the gradients of the pass before; set run.config.micro_batch_size: "
            f"{half}, which trains without CUDA graphs, or run.config.batch_size: {half * ranks.world}"
        )
    if size == before:
        return OutOfMemoryError(
            f"rank {ranks.rank} is out of memory with micro_batch_size {before}, which can't be reduced: use a smaller "
            "model or block_size, activation_checkpointing: full, or parallel: fsdp"
        )
    return OutOfMemoryError(
        f"rank {ranks.rank} is out of memory with micro_batch_size {before}, and the step can't be retried on one rank "
        f"alone: the next start resumes from the newest checkpoint with micro_batch_size {size}"
    )
