"""Classify kernels and operators by name. Standard library only.

The names come from NVIDIA's libraries, PyTorch, Inductor and NCCL: cuBLAS (gemm, nvjet on Hopper, xmma), CUTLASS, cuDNN
(…fprop, …dgrad, …wgrad, implicit…), FlashAttention (flash_fwd, fmha), Inductor (triton_tem_: matrix products from
templates; triton_poi_, triton_red_, triton_per_: pointwise and reductions, whichever operators follow in the name),
NCCL (ncclDevKernel_…).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

Kind = Literal["compute", "memory", "optimizer", "communication", "to_device", "to_host"]

_KERNELS: tuple[tuple[Kind, str], ...] = (
    ("communication", r"nccl|rccl|all_?reduce_kernel|(one|two)_shot_|multimem_|nvshmem"),
    ("to_device", r"memcpy htod"),
    ("to_host", r"memcpy dtoh"),
    ("optimizer", r"multi_tensor_apply|fused_?adam|adam\w*_kernel|fused_?sgd"),
    ("memory", r"memcpy|memset|at::native.*(elementwise|copy)|^triton_(poi|red|per|for|split|unk)_"),
    ("compute", r"gemm|gemv|cijk_|cutlass|cublas|nvjet|xmma|wgmma|flash|fmha|attention|attn|winograd|implicit_con"),
    ("compute", r"fprop|dgrad|wgrad|scudnn|cudnn.*conv|conv(olution|_depthwise|2d)|triton_tem|_mm_"),
    ("memory", r"elementwise|reduce|reduction|norm|softmax|copy|concat|catarray|fill|gather|scatter|index|embedding"),
    ("memory", r"dropout|transpose|permute|bn_(fw|bw)|pool|cross_entropy|nll_loss"),
    ("memory", r"sort|scan|cub::|unrolled|upsample|nchwtonhwc|nhwctonchw|cast|distribution_"),
)
_KERNEL_RULES = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _KERNELS)


@lru_cache(maxsize=4096)
def kernel(name: str) -> Kind:
    """Return the kind of a kernel, copy or fill on a device. Unknown names (custom kernels) count as compute."""
    return next((kind for kind, rule in _KERNEL_RULES if rule.search(name)), "compute")


SYNCS = frozenset(
    {
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
        *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
        *("hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream"),
    }
)
"""Calls in which the host waits for the device."""

ALLOCATIONS = frozenset(
    {
        *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cuMemCreate", "cuMemMap", "cuMemUnmap"),
        *("cuMemRelease", "cuMemSetAccess", "hipMalloc", "hipFree"),
    }
)
"""Calls that allocate or free memory in the driver. In a steady run PyTorch's allocator makes none."""

READS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
"""Operators that copy a number to the host."""

VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        *("as_strided", "select", "unbind", "slice", "narrow", "split", "chunk", "view", "_unsafe_view", "expand", "t"),
        *("transpose", "permute", "squeeze", "unsqueeze", "detach", "alias", "unfold", "empty", "empty_like", "numel"),
        *("reshape", "flatten", "expand_as", "view_as", "empty_strided", "result_type", "to", "resize_", "set_"),
    )
)
"""Operators that move no data themselves, however long they take."""

_MATRIX = re.compile(
    r"^(aten|mkldnn|onednn|quantized|_c10d_functional)::_?(\w*(mm|bmm|addmv|matmul|linear|convolution\w*|conv\d?d\w*"
    r"|attention\w*|einsum|lstm\w*|gru\w*|dot|mv|ger)|scaled_dot_product\w*|mkldnn_\w+)$"
)


@lru_cache(maxsize=4096)
def is_matrix(operator: str) -> bool:
    """Return whether a host operator is a matrix product, a convolution or attention."""
    return bool(_MATRIX.match(operator))


_TALKS = re.compile(r"^(c10d::|gloo:|nccl:|mpi:|ucc:|record_param_comms|_c10d_functional::)")


@lru_cache(maxsize=4096)
def is_communication(event: str) -> bool:
    """Return whether a host event is communication with other ranks, or waiting for it."""
    return bool(_TALKS.match(event))


def is_batch_wait(event: str) -> bool:
    return event == "data" or event.startswith("enumerate(DataLoader)")
