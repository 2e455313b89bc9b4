"""How many samples go through the model at a time: the most that fit, found out before training, and less after all if
the memory runs out later."""

from __future__ import annotations

import gc
import json
import re
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

ROOM = 0.9
"""The part of a GPU's memory that a probe may fill: what NCCL, the compiler and fragments take comes on top."""

FULL = re.compile(r"\bout of memory\b|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w*ALLOC\w*_FAILED|NOT_INITIALIZED)")
"""What CUDA and its libraries say where the memory is all torch's: kernels that can't be loaded, handles (which cuBLAS
then calls not initialized), workspaces. Triton and NCCL pass CUDA's words on."""


class Portions:
    """This rank's share of a global batch, cut into micro-batches. The same size on all ranks at the start of training;
    a rank whose memory runs out later halves its own."""

    def __init__(self, share: int, size: int, choice: Choice) -> None:
        """`share` samples, `size` at a time."""
        self.share, self.size, self.choice = share, size, choice

    @property
    def count(self) -> int:
        """Micro-batches in a step."""
        return -(-self.share // self.size)

    def at_most(self, size: int, why: str) -> Portions:
        """The largest micro-batch that has no more samples, and why it has no more."""
        found = max(each for each in divisors(self.share) if each <= size)
        return Portions(self.share, found, Choice("micro-batch", str(found), why))

    def halve(self) -> bool:
        """Half the size, but a divisor of the share. Whether that is possible."""
        smaller = [size for size in divisors(self.share) if size <= self.size // 2]
        if smaller:
            self.size = smaller[-1]
        return bool(smaller)


def portions(batch_size: int, asked: int | None, world: int) -> Portions:
    """As the spec says; auto is all of a rank's share, until `probed`.

    Raises UsageError if the global batch can't be shared evenly.
    """
    if batch_size % world:
        near = max(world, round(batch_size / world) * world)
        raise UsageError(f"batch_size {batch_size} can't be shared by {world} processes evenly; {near} can")
    mine = batch_size // world
    if asked is None:
        return Portions(mine, mine, Choice("micro-batch", str(mine), "all of a rank's share"))
    if mine % asked:
        raise UsageError(f"micro_batch_size {asked} doesn't divide the {mine} samples that each of {world} ranks has")
    return Portions(mine, asked, Choice("micro-batch", str(asked), "the spec says so"))


def divisors(number: int) -> list[int]:
    """All divisors, the smallest first."""
    small = [one for one in range(1, int(number**0.5) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def largest(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ascending `sizes` that fits, by binary search; None if the smallest doesn't. The largest is tried
    first: most runs fit."""
    low, high = -1, len(sizes) - 1
    probe = high
    while low < high:
        if fits(sizes[probe]):
            low = probe
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return sizes[low] if low >= 0 else None


def nearest(sizes: list[int], start: int | None, fits: Callable[[int], bool]) -> int | None:
    """Return the largest of ascending `sizes` that fits, searching from `start` upwards, then downwards, as each try is
    expensive. `start` None: from the smallest."""
    at = -1 if start is None else sizes.index(start)
    found = None
    for size in takewhile(fits, sizes[at + 1 :]):
        found = size
    return found or next(filter(fits, reversed(sizes[: at + 1])), None)


def probed(
    ranks: Ranks,
    share: int,
    attempt: Callable[[int], None],
    reserved: int,
    compiled: Callable[[int], None] | None = None,
) -> Portions:
    """The largest micro-batch with which `attempt`, a forward and a backward pass of so many samples, doesn't run out
    of memory on any rank; or `compiled`, the same after the compiler, which takes longer and is tried in the
    neighbourhood of what `attempt` has found. `reserved` bytes are kept free for what training will have beside it.
    Every rank calls it.

    Raises OutOfMemoryError on all ranks alike: not even one sample fits.
    """
    tried: list[int] = []

    def fits(how: Callable[[int], None], size: int) -> bool:
        tried.append(size)
        mine = survives(ranks.device, lambda: how(size), reserved)
        barrier(ranks)  # one may make its first batch, or compile, for longer than a collective waits
        return agreed(ranks, mine)

    sizes = divisors(share)
    with leaving_room(ranks.device):
        found = largest(sizes, partial(fits, attempt))
        if compiled:
            found = nearest(sizes, found, partial(fits, compiled)) or found
    if found is None:
        raise OutOfMemoryError(
            f"not even one sample fits into the memory of this device ({memory_text(ranks.device)}): a smaller model "
            "or block_size, activation_checkpointing: full, or parallel: fsdp"
        )
    why = f"the largest of {len(tried)} tried that fits into {memory_text(ranks.device)}"
    return Portions(share, found, Choice("micro-batch", str(found), why))


def is_bounded(device: torch.device) -> bool:
    """Whether memory that runs out is an error there: a host's is lent without end, until the kernel kills."""
    return device.type == "cuda"


def survives(device: torch.device, attempt: Callable[[], None], reserved: int) -> bool:
    """Whether the attempt goes well with `reserved` bytes of the device's memory taken."""
    try:
        with by_its_name():
            _beside(reserved, device, attempt)
    except torch.OutOfMemoryError:
        return False
    finally:
        free(device)
    return True


def _beside(reserved: int, device: torch.device, attempt: Callable[[], None]) -> None:
    """In a frame of its own: once it is left, nothing holds the memory."""
    kept = torch.empty(reserved, dtype=torch.uint8, device=device)
    attempt()
    del kept


@contextmanager
def leaving_room(device: torch.device) -> Iterator[None]:
    """Inside torch's tensors take no more of a GPU than `allowed`, and a tensor too much is an error as on a full one.

    A tensor that holds the rest would keep it from those, too, whom it is for: in the first pass CUDA loads its
    kernels, and cuBLAS and cuDNN open.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction(device)
    (left, total), own = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    part = min(ROOM * before, allowed(left, total, own))  # torch may have been told a limit
    torch.cuda.set_per_process_memory_fraction(part, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.reset_peak_memory_stats(device)  # the rows say what training takes


def allowed(left: int, total: int, own: int) -> float:
    """The part of a GPU's `total` bytes that torch's tensors may take, of which they have `own`, and `left` are free:
    ROOM, less what is taken already, by CUDA itself, NCCL or another process."""
    return max(0.0, ROOM - (total - left - own) / total)


def free(device: torch.device) -> None:
    """Give back what nobody holds any more. After an error its traceback holds the tensors of the frames it left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def agreed(ranks: Ranks, mine: bool) -> bool:
    """Whether it is so on all ranks."""
    if ranks.world == 1:
        return mine
    flag = torch.tensor([int(mine)], device=ranks.device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def to_reserve(model: nn.Module, held: int, *, buckets: bool) -> int:
    """Bytes that training will hold beside the model, its gradients and its activations: `held` by the optimizer for
    each parameter, and as much again where DDP puts the gradients into `buckets`: other ones after the first step."""
    here = [dtensor.local_part(p) for p in model.parameters() if p.requires_grad]
    return sum(p.numel() * p.element_size() for p in here) * (held + buckets)


def memory_text(device: torch.device) -> str:
    """`79.2 GB`, or the host's where there is no GPU."""
    if device.type != "cuda":
        return "the host's memory"
    return f"{torch.cuda.get_device_properties(device).total_memory / 1e9:.1f} GB"


# --- Later ------------------------------------------------------------------------------------------------------------

LEARNED = "micro_batch.json"
"""In the run folder: the smallest micro-batch that a rank of the run had to reduce to (JSON: size)."""

TRIES = 64
"""Attempts to write it while other ranks do: at least as many as ranks of a large run write at once."""


def learned(storage: Storage | None) -> int | None:
    """The micro-batch size that an earlier start found out; None: none did."""
    return _read(storage)[0] if storage is not None else None


def learn(storage: Storage | None, size: int) -> None:
    """Let the starts to come begin with it, or with less, if that is what another rank has learnt. A folder that can't
    be written keeps nobody from ending."""
    if storage is not None:
        with suppress(OutputError):
            for _ in range(TRIES):
                if _learnt(storage, size):
                    return


def _learnt(storage: Storage, size: int) -> bool:
    """Return whether the folder now has this size or a smaller one; False if another rank wrote at the same time."""
    known, version = _read(storage)
    if known is not None and known <= size:
        return True
    try:
        storage.swap(LEARNED, json.dumps({"size": size}).encode(), version)
    except FileExistsError:
        return False
    return True


def _read(storage: Storage) -> tuple[int | None, str]:
    """Return the stored size (None if damaged or missing) and its version."""
    try:
        content, version = storage.read_version(LEARNED)
    except FileNotFoundError:
        return None, ""
    try:
        size = json.loads(content)["size"]
    except (ValueError, KeyError, TypeError):
        return None, version
    return size if isinstance(size, int) and size > 0 else None, version


def again(parts: Portions, model: nn.Module, ranks: Ranks) -> bool:
    """After the memory ran out in a step: halve the micro-batch, and say whether the step can be done again here, while
    the peers wait in their all-reduce.

    Not where the model has buffers and there are peers: DDP sends them round in the first forward pass of a step, which
    the peers have made. Nor where the model is shared out: they wait for its parts.
    """
    alone = ranks.world == 1 or not (fsdp.is_sharded(model) or any(True for _ in model.buffers()))
    return parts.halve() and alone


@contextmanager
def in_words(ranks: Ranks) -> Iterator[None]:
    """Memory that runs out inside, where no smaller micro-batch can help: raises OutOfMemoryError, of ours."""
    try:
        with by_its_name():
            yield
    except torch.OutOfMemoryError as error:
        said = str(error).partition("\n")[0][:160]
        raise OutOfMemoryError(
            f"rank {ranks.rank} is out of memory: {said}: a smaller model, micro_batch_size or block_size, "
            "activation_checkpointing: full, or parallel: fsdp"
        ) from error


@contextmanager
def by_its_name() -> Iterator[None]:
    """Memory that runs out inside is torch.OutOfMemoryError, whoever it was that asked for it: torch has that name for
    its own tensors only."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not FULL.search(str(error)):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def given_up(parts: Portions, before: int, ranks: Ranks) -> OutOfMemoryError:
    """Why this process ends: its micro-batch was `before`, and is what the starts to come begin with."""
    if parts.size == before:
        return OutOfMemoryError(
            f"rank {ranks.rank} is out of memory with {before} samples at a time, and can't take less"
        )
    return OutOfMemoryError(
        f"rank {ranks.rank} is out of memory with {before} samples at a time, in the middle of what all ranks do: "
        f"another start goes on from the newest checkpoint with {parts.size} (micro_batch_size: {parts.size})"
    )
