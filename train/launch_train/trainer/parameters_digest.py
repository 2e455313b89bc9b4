"""SHA-256 of a model's parameters, and its comparison between the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from launch_train.distributed.dtensor import is_sharded, local_part
from launch_train.distributed.process_group import Ranks, gather
from launch_train.performance import fsdp


def parameters_sha256(model: nn.Module, ranks: Ranks) -> str:
    """Return the SHA-256 over name, type, shape and bytes of each parameter and buffer (batch norm's running averages).

    Collective if the model is sharded: each rank hashes its shards, and their digests are hashed in the ranks' order.
    The result then depends on the number of ranks, but no rank gathers the model.
    """
    fsdp.reshard(model)
    digest, shards = hashlib.sha256(), hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        values = local_part(tensor.detach()).cpu().contiguous()
        part = shards if is_sharded(tensor) else digest
        part.update(f"{name} {values.dtype} {tuple(tensor.shape)}\n".encode())
        part.update(values.flatten().view(torch.uint8).numpy().tobytes())
    if fsdp.is_sharded(model):
        digest.update(" ".join(gather(ranks, shards.hexdigest())).encode())
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
