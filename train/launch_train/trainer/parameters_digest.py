"""SHA-256 of a model's parameters, and its comparison between the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from launch_train.distributed.dtensor import full_tensor
from launch_train.performance import fsdp


def parameters_sha256(model: nn.Module) -> str:
    """Return the SHA-256 over name, type, shape and bytes of each parameter and buffer (batch norm's running averages).

    Collective if the model is sharded: the parameters are gathered one after the other.
    """
    fsdp.reshard(model)
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = full_tensor(tensor.detach()).cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def find_disagreement(digests: Sequence[str]) -> str | None:
    """Return an error message that names the ranks of each digest, or None if all are equal."""
    if len(set(digests)) == 1:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    listed = "; ".join(f"ranks {', '.join(map(str, members))}: {digest[:16]}…" for digest, members in ranks.items())
    return f"the ranks' parameters differ at the end, so the result must not be trusted ({listed})"
