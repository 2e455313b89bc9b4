"""One number for all parameters of a model, and whether the ranks agree on it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from launch_train.distributed.dtensor import full_tensor
from launch_train.performance import fsdp


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 over name, type, shape and bytes of each parameter and buffer (batch norm's running averages). Of a model
    that is shared out all ranks ask together; each brings one parameter after the other together."""
    fsdp.reshard(model)
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = full_tensor(tensor.detach()).cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def disagreement(digests: Sequence[str]) -> str | None:
    """What is wrong if the ranks' digests differ, naming the ranks of each; None if they agree."""
    if len(set(digests)) == 1:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    said = "; ".join(f"ranks {', '.join(map(str, who))}: {digest[:16]}…" for digest, who in ranks.items())
    return f"the ranks' parameters differ at the end, so the result must not be trusted ({said})"
