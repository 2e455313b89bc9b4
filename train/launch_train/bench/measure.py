"""Measure a machine: matrix products, memory, copies to the GPU, all-reduce, training steps, and a DataLoader.

All ranks measure each part at the same time, as they work in training. Times are the median of repeats after a warm-up,
on a GPU by CUDA events.
"""

from __future__ import annotations

import io
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from launch_train import models
from launch_train.bench.figures import BenchFigure, Measured, Trouble
from launch_train.common import contract
from launch_train.common.cgroup import cores
from launch_train.common.config import Config, Gpt, ResNet
from launch_train.common.errors import UnfitError
from launch_train.common.text import one_line, plural
from launch_train.distributed.process_group import Ranks, barrier, gather
from launch_train.performance import precision

QUICK, WHOLE = 0.3, 1.5
"""Seconds of measuring for each figure."""


def measure_all(
    ranks: Ranks, parts: Sequence[str], *, quick: bool, env: Mapping[str, str], say: Callable[[str], None]
) -> list[Measured]:
    """Measure the parts, and return the measurements of all ranks, in order, on every rank.

    `say` is called with each part's name before it starts.
    """
    figures: list[BenchFigure] = []
    troubles: list[Trouble] = []
    seconds: dict[str, float] = {}
    is_gpu = ranks.device.type == "cuda"
    for part in parts:
        barrier(ranks)
        say(part)
        began = time.monotonic()
        try:
            figures += measure_part(part, ranks, quick)
        except (RuntimeError, OSError, ImportError, UnfitError) as error:  # torch.OutOfMemoryError is a RuntimeError
            troubles.append(Trouble(part, one_line(error, 200)))
        if is_gpu:
            with suppress(RuntimeError):  # after some CUDA errors every call fails
                torch.cuda.empty_cache()
        seconds[part] = round(time.monotonic() - began, 2)
    barrier(ranks)
    measured = Measured(
        rank=ranks.rank,
        node=int(env.get(contract.NODE) or env.get("GROUP_RANK") or 0),
        gpu=ranks.local_rank,
        host=socket.gethostname(),
        device=torch.cuda.get_device_name(ranks.device) if is_gpu else "cpu",
        figures=tuple(figures),
        troubles=tuple(troubles),
        pcie=pcie_link(ranks.device) if is_gpu else None,
        seconds=seconds,
    )
    return gather(ranks, measured)


def measure_part(part: str, ranks: Ranks, quick: bool) -> list[BenchFigure]:
    """Measure one part. Figures of the node are measured by its first rank while the others wait."""
    device, budget, is_first = ranks.device, QUICK if quick else WHOLE, ranks.local_rank == 0
    match part:
        case "matmul":
            return matrix_products(device, budget, host=is_first)
        case "memory":
            return memory_bandwidth(device, budget)
        case "host":
            return host_copies(device, budget)
        case "allreduce":
            return all_reduce(ranks, QUICK_SIZES if quick else SIZES, budget)
        case "amp":
            return training_steps(device, 2 * budget, quick)
        case _:
            return data_loading(2 * budget, quick) if is_first else []


def pcie_link(device: torch.device) -> tuple[int, int] | None:
    """Return the maximum generation and lanes of the GPU's link from nvidia-smi, or None if unknown."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    query = ["nvidia-smi", "--query-gpu=pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader", "-i", uuid]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    parts = [part.strip() for part in printed.split(",")]  # `4, 16`; in some VMs `[N/A]`
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None


# --- Time -------------------------------------------------------------------------------------------------------------

FEWEST, MOST = 3, 1000
"""Bounds of the repeats. A matrix product on a large GPU takes 1.5 ms: a few would finish before power throttling."""
WARM_SECONDS: Final = 0.25
"""Warm-up before measuring a GPU: an idle GPU lowers its clocks, and needs some tenths of a second to raise them."""


def median_seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """Return the median seconds of one `work`, from 3 to 1000 repeats, as many as fit into `budget` seconds."""
    began = time.perf_counter()
    work()  # includes allocations and kernel selection
    while True:
        (last,) = run_times(work, device, 1)
        if device.type != "cuda" or time.perf_counter() - began > WARM_SECONDS:
            return statistics.median(run_times(work, device, repeats(last, budget)))


def repeats(seconds: float, budget: float) -> int:
    return max(FEWEST, min(MOST, round(budget / max(seconds, 1e-9))))


def run_times(work: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Return the seconds of each of `count` runs, after all work that is queued on the device."""
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(count):
            work()
            ends.append(time.perf_counter())
        return [after - before for before, after in pairwise(ends)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]  # torch leaves it untyped
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


# --- Matrix products --------------------------------------------------------------------------------------------------

DTYPES: Final = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GPU_SIZE, CPU_SIZE = 8192, 1024
"""Rows and columns. 8192 gives 1.1 TFLOP, enough to use any GPU fully."""
SPEED_UP: Final = "GPU/CPU fp32"


def matrix_products(device: torch.device, budget: float, *, host: bool, size: int | None = None) -> list[BenchFigure]:
    """Measure TFLOP/s of this process's device in each number format, for `budget` seconds each.

    bf16 and TF32 need Ampere or newer; older GPUs only emulate them. A CPU may emulate bf16, too. With `host`, and if
    the device is a GPU, also measure the CPU, on all cores that this process may use.
    """
    if device.type == "cuda":
        is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        kinds, size = ("fp32", "tf32", "fp16", "bf16") if is_ampere else ("fp32", "fp16"), size or GPU_SIZE
    else:
        kinds, size = ("fp32", "bf16"), size or CPU_SIZE
    figures = [BenchFigure(f"matmul {kind}", tflops(device, kind, size, budget), "TFLOP/s") for kind in kinds]
    if host and device.type == "cuda":
        with cpu_threads(cores()):
            on_cpu = tflops(torch.device("cpu"), "fp32", 2 * CPU_SIZE, budget)
        figures.append(BenchFigure("matmul CPU fp32", on_cpu, "TFLOP/s"))
        figures.append(BenchFigure(SPEED_UP, figures[0].value / on_cpu, "x"))
    return figures


def tflops(device: torch.device, kind: str, size: int, budget: float) -> float:
    """Measure the TFLOP/s of a product of two square matrices, which takes 2 size^3 operations.

    The matrices are random: zeros take less power, so the GPU would seem faster than it is.
    """
    a, b = (torch.randn(size, size, device=device).to(DTYPES[kind]) for _ in range(2))
    out = torch.empty_like(a)
    with tf32_products(kind == "tf32"):
        return 2 * size**3 / median_seconds(lambda: torch.mm(a, b, out=out), device, budget) / 1e12


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 for fp32 products inside the context."""
    before, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set torch's number of CPU threads inside the context. The default is 1 under torchrun, else one per core."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- Memory and copies ------------------------------------------------------------------------------------------------

GPU_BYTES, CPU_BYTES = 1 << 29, 1 << 27
"""Size of each array. 512 MiB is far larger than any GPU's cache (B200: 126 MB)."""
HOST_BYTES: Final = 1 << 28


def memory_bandwidth(device: torch.device, budget: float, size: int | None = None) -> list[BenchFigure]:
    """Measure STREAM's copy (a = b) and triad (a = b + s c) kernels. `size`: bytes of each array.

    https://www.cs.virginia.edu/stream/ref.html
    """
    size = size or (GPU_BYTES if device.type == "cuda" else CPU_BYTES)
    a, b, c = (torch.ones(size // 4, device=device) for _ in range(3))
    copy = median_seconds(lambda: a.copy_(b), device, budget)
    triad = median_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), device, budget)
    return [bandwidth("memory copy", 2 * size, copy), bandwidth("memory triad", 3 * size, triad)]


def host_copies(device: torch.device, budget: float) -> list[BenchFigure]:
    """Measure copies to and from the GPU, with pinned and pageable host memory. Empty if the device is the CPU."""
    if device.type != "cuda":
        return []
    on_gpu = torch.ones(HOST_BYTES // 4, device=device)
    pinned, pageable = torch.ones(HOST_BYTES // 4, pin_memory=True), torch.ones(HOST_BYTES // 4)
    copies = {
        "to GPU, pinned": (on_gpu, pinned),
        "to GPU, pageable": (on_gpu, pageable),
        "from GPU, pinned": (pinned, on_gpu),
        "from GPU, pageable": (pageable, on_gpu),
    }
    return [
        bandwidth(name, HOST_BYTES, median_seconds(partial(target.copy_, source, non_blocking=True), device, budget))
        for name, (target, source) in copies.items()
    ]


def bandwidth(name: str, moved: float, seconds: float) -> BenchFigure:
    """Return a figure in GB/s (1e9 bytes). `moved`: bytes read and written."""
    return BenchFigure(name, moved / seconds / 1e9, "GB/s")


# --- All-reduce -------------------------------------------------------------------------------------------------------

SIZES: Final = (1, 4, 16, 64, 256)
QUICK_SIZES: Final = (1, 16, 64)
"""Sizes in MB (2^20 bytes). DDP's buckets have 25 MB."""
LINK: Final = "link to the next"
LINK_MB: Final = 256
"""MB per direction on GPUs. Starting an exchange takes the host 0.2 ms, enough for NVLink to transfer 100 MB."""


def all_reduce(ranks: Ranks, sizes: Sequence[int], budget: float) -> list[BenchFigure]:
    """Measure the bus bandwidth of all-reduce for each size in MB, and the link to the next rank of the node.

    Empty for a single rank. Raises UnfitError on all ranks if one has too little memory.
    """
    if ranks.world == 1:
        return []
    buffer = shared_buffer(ranks, max(*sizes, 2 * LINK_MB if ranks.device.type == "cuda" else 0) << 18)
    figures = []
    for size in sizes:
        reduce = partial(dist.all_reduce, buffer[: size << 18])
        slowest = max(gather(ranks, collective_seconds(ranks, reduce, budget)))
        figures.append(bandwidth(f"all-reduce {size} MB", bus_bytes(size << 20, ranks.world), slowest))
    firsts = gather(ranks, ranks.node_rank)
    if max(Counter(firsts).values()) == 1:
        return figures
    ring = [rank for rank, first in enumerate(firsts) if first == ranks.node_rank]
    sent, received = buffer.chunk(2)
    seconds = collective_seconds(ranks, lambda: pass_on(ranks.rank, ring, sent, received), budget)
    return [*figures, *([bandwidth(LINK, sent.nbytes, seconds)] if len(ring) > 1 else [])]


def bus_bytes(reduced: int, ranks: int) -> float:
    """Return the bytes that each link transfers in an all-reduce of `reduced` bytes, for reduce-scatter and all-gather.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    return 2 * (ranks - 1) / ranks * reduced


def shared_buffer(ranks: Ranks, count: int) -> Tensor:
    """Allocate zeros, which stay zero in repeated sums. Raises UnfitError on all ranks if one fails."""
    problem, buffer = "", torch.empty(0)
    try:
        buffer = torch.zeros(count, device=ranks.device)
    except RuntimeError as error:  # includes torch.OutOfMemoryError
        problem = f"rank {ranks.rank}: {error}".partition("\n")[0]
    if first := next(filter(None, gather(ranks, problem)), ""):
        raise UnfitError(first)
    return buffer


def pass_on(rank: int, ring: Sequence[int], sent: Tensor, received: Tensor) -> None:
    """Send to the next rank of the node's ring while receiving as much from the previous one.

    All ranks exchange at the same time, and a slow link shows at both of its ends. A rank alone exchanges nothing.
    """
    if len(ring) == 1:
        return
    at = ring.index(rank)
    after, before = ring[(at + 1) % len(ring)], ring[at - 1]
    for request in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    ):
        request.wait()


def collective_seconds(ranks: Ranks, work: Callable[[], object], budget: float) -> float:
    """Return this rank's median seconds. All ranks run the same number of repeats, which rank 0 decides."""
    run_times(work, ranks.device, 2)
    each = statistics.median(run_times(work, ranks.device, 2))
    return statistics.median(run_times(work, ranks.device, gather(ranks, repeats(each, budget))[0]))


# --- Training steps ---------------------------------------------------------------------------------------------------

LARGE_GB: Final = 36.0
"""GPUs with at least this memory get larger batches: with small ones they wait for kernel launches."""


class Trial(NamedTuple):
    name: str
    shape: Gpt | ResNet
    batch: int


def training_steps(device: torch.device, budget: float, quick: bool) -> list[BenchFigure]:
    """Measure tokens or images per second in fp32 (without TF32) and in mixed precision, and the speed-up.

    Mixed precision on a GPU is the trainer's choice, or fp16 if it chooses none; on a CPU it is bf16.
    """
    is_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory / 1e9 if is_gpu else None
    mixed = mixed_precision(torch.cuda.get_device_capability(device) if is_gpu else None)
    figures = list[BenchFigure]()
    for trial in trials(memory, quick):
        unit, per_sample = ("tokens/s", trial.shape.block_size) if isinstance(trial.shape, Gpt) else ("images/s", 1)
        rates = []
        for policy in (precision.POLICIES["fp32"], mixed):
            with tf32_products(policy.tf32):
                seconds = median_seconds(training_step(trial, policy, device), device, budget)
            rates.append(trial.batch * per_sample / seconds)
            figures.append(BenchFigure(f"{trial.name} {policy.name}", rates[-1], unit))
        figures.append(BenchFigure(f"{trial.name} {mixed.name}/fp32", rates[1] / rates[0], "x"))
    return figures


def trials(memory_gb: float | None, quick: bool) -> list[Trial]:
    """Return the trials for a GPU with that memory, or for a CPU (None). A quick run only has the GPT."""
    if memory_gb is None:
        both = [Trial("GPT", Gpt(), 12), Trial("ResNet-50", ResNet(image_size=64, width=16), 8)]
    else:
        is_large = memory_gb >= LARGE_GB
        gpt = Gpt(n_layer=6, n_head=12, n_embd=768, block_size=512, vocab_size=50304)
        both = [Trial("GPT", gpt, 32 if is_large else 4), Trial("ResNet-50", ResNet(), 128 if is_large else 32)]
    return both[:1] if quick else both


def mixed_precision(capability: tuple[int, int] | None) -> precision.PrecisionPolicy:
    """Return the precision to compare with fp32, by the GPU's compute capability; None: a CPU."""
    if capability is None:
        return precision.POLICIES["bf16"]
    chosen = precision.choose("auto", "cuda", capability)
    return chosen if chosen.autocast else precision.POLICIES["fp16"]


def training_step(trial: Trial, policy: precision.PrecisionPolicy, device: torch.device) -> Callable[[], None]:
    """Return a function that runs forward, backward and update, always on the same batch."""
    model: nn.Module = models.build_model(Config(model=trial.shape)).to(device)
    shape = trial.shape
    if isinstance(shape, Gpt):
        inputs, targets = torch.randint(shape.vocab_size, (2, trial.batch, shape.block_size), device=device)
    else:
        inputs = torch.randn(trial.batch, 3, shape.image_size, shape.image_size, device=device)
        targets = torch.randint(shape.num_classes, (trial.batch,), device=device)
    if isinstance(shape, ResNet) and device.type == "cuda":  # in both trials, so that only the precision differs
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack memory_format
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    scaler = precision.scaler(policy, device)

    def step() -> None:
        with precision.autocast(policy, device):
            loss = model(inputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


# --- Data loading -----------------------------------------------------------------------------------------------------

PHOTOGRAPH_SIZE: Final = (500, 375)
"""Width and height in pixels: the most common size in ImageNet."""
CROP: Final = 224
LOADER_BATCH: Final = 8
MOST_WORKERS: Final = 16


def data_loading(budget: float, quick: bool) -> list[BenchFigure]:
    """Measure a DataLoader's samples per second for `budget` seconds with each number of workers.

    Samples are JPEGs, decoded, cropped and converted to tensors. torch uses one thread, as in workers and under
    torchrun: more threads don't speed up decoding one image.
    """
    photographs = Photographs(make_photograph())
    with cpu_threads(1):
        return [
            BenchFigure(f"loader, {plural(count, 'worker')}", loading_rate(photographs, count, budget), "samples/s")
            for count in worker_counts(quick)
        ]


def worker_counts(quick: bool, most: int | None = None) -> tuple[int, ...]:
    """Return the numbers of workers: 0, 1, 2, 4 … up to the cores, at most 16; quick: only the first and the last."""
    most = min(most or cores(), MOST_WORKERS)
    doubled = [1 << n for n in range(most.bit_length()) if 1 << n < most]
    return (0, most) if quick else (0, *doubled, most)


class Photographs(Dataset[Tensor]):
    """A dataset of one JPEG, which is decoded again for each sample."""

    def __init__(self, jpeg: bytes) -> None:
        self._jpeg = jpeg

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        """Return a crop [3, 224, 224] in the range 0 to 1; its position depends on the index."""
        from PIL import Image

        left, top = (index % (length - CROP) for length in PHOTOGRAPH_SIZE)
        with Image.open(io.BytesIO(self._jpeg)) as image:
            crop = image.convert("RGB").resize((CROP, CROP), box=(left, top, left + CROP, top + CROP))
        return torch.from_numpy(np.array(crop)).permute(2, 0, 1).float() / 255


def make_photograph() -> bytes:
    """Return a JPEG of quality 85: a gradient with noise, about 100 KB like ImageNet's images."""
    from PIL import Image

    width, height = PHOTOGRAPH_SIZE
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    slope = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 40, height)[:, None, None]
    file = io.BytesIO()
    Image.fromarray(np.clip(slope + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def loading_rate(data: Dataset[Tensor], workers: int, budget: float) -> float:
    """Return samples per second, measured after two batches per worker to exclude the start of the workers."""
    batches = iter(DataLoader(data, batch_size=LOADER_BATCH, num_workers=workers))
    for _ in range(max(1, 2 * workers)):
        next(batches)
    samples, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < budget or not samples:
        samples += len(next(batches))
    return samples / (now - began)
