"""Builds traces as torch.profiler writes them on a machine with a GPU: times in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

Event = dict[str, Any]

MAIN, AUTOGRAD, LOADER = 100, 101, 102
"""Threads of the host: those that train, and one that pins batches."""
STREAM, SIDE, NCCL = 7, 13, 20

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
ADAM = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
TO_DEVICE, TO_HOST = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"

_correlations = count(1)


def host(name: str, begin: float, end: float, thread: int = MAIN, kind: str = "user_annotation") -> Event:
    return _event(kind, name, begin, end, 4242, thread)


def call(name: str, begin: float, end: float, thread: int = MAIN, correlation: int = 0) -> Event:
    arguments = {"cbid": 211, "correlation": correlation or next(_correlations)}
    return _event("cuda_runtime", name, begin, end, 4242, thread) | {"args": arguments}


def launched(name: str, at: float, begin: float, end: float, stream: int = STREAM, thread: int = MAIN) -> list[Event]:
    """A call at `at`, and what the device does of it from `begin` to `end`."""
    number, copies = next(_correlations), name.startswith("Memcpy")
    kind = "gpu_memcpy" if copies else "kernel"
    asked = call("cudaMemcpyAsync" if copies else "cudaLaunchKernel", at, at + 3, thread, number)
    done = _event(kind, name, begin, end, 0, stream)
    return [asked, done | {"args": {"device": 0, "stream": stream, "correlation": number}}]


def _event(kind: str, name: str, begin: float, end: float, pid: int, tid: int) -> Event:
    return {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin, "args": {}}


def phases(at: float, data: float, forward: float, backward: float, optimizer: float) -> list[Event]:
    """The ranges of a step that begins at `at`, one after the other; each ends so long after the step's begin."""
    ends = {"data": data, "forward": forward, "backward": backward, "optimizer": optimizer}
    begins = [0.0, *ends.values()]
    return [host(name, at + begin, at + end) for begin, (name, end) in zip(begins, ends.items(), strict=False)]


def steps(one: Callable[[float], Iterable[Event]], number: int = 4, period: float = 10_000.0) -> list[Event]:
    """So many steps, each of which does what `one` says for its begin."""
    begins = [1_000_000.0 + index * period for index in range(number)]
    marks = [host(f"ProfilerStep#{index}", at, at + period) for index, at in enumerate(begins)]
    return [*marks, *(event for at in begins for event in one(at)), *_ends()]


def _ends() -> list[Event]:
    """What else is in a file."""
    return [
        {"ph": "M", "name": "process_name", "pid": 4242, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "pid": 4242, "tid": MAIN, "ts": 5.0, "cat": "ac2g", "name": "ac2g"},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": 4242, "tid": MAIN, "ts": 6.0},
    ]
