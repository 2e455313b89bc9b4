"""Validate custom batches for a built-in or transformers model, on the CPU.

On a GPU, a token beyond the vocabulary is an opaque device assert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from launch_train.data.map_dataset import describe
from launch_train.data.source import IGNORED, Batch


class BatchRequirements(NamedTuple):
    """The batches that a model accepts. `most`: maximum tokens in a sample; `known`: number of tokens or classes; None:
    unlimited. `judges`: the model computes the loss, so targets are validated, too."""

    name: str
    takes: Literal["tokens", "images"]
    known: int | None
    most: int | None = None
    judges: bool = True


class Unsuited(NamedTuple):
    """The index in the batch of a sample that the model doesn't accept, and the reason."""

    sample: int
    why: str


def unsuited(batch: Batch, requirements: BatchRequirements) -> Unsuited | None:
    """Return the first problem of a batch, or None. Of mappings, only `input_ids` or `pixel_values` is validated."""
    first: Any
    first, targets = batch
    if isinstance(first, Mapping):
        first = first.get("input_ids" if requirements.takes == "tokens" else "pixel_values")
    if not isinstance(first, Tensor):
        return None  # other inputs that a model may accept by name
    if wrong := (_tokens if requirements.takes == "tokens" else _images)(first, requirements):
        return wrong
    return _targets(targets, requirements) if requirements.judges and isinstance(targets, Tensor) else None


def _tokens(tokens: Tensor, requirements: BatchRequirements) -> Unsuited | None:
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return Unsuited(0, f"is {describe(tokens[0])}, and {requirements.name} takes int64[tokens]")
    if requirements.most is not None and tokens.shape[1] > requirements.most:
        return Unsuited(0, f"has {tokens.shape[1]} tokens, and {requirements.name} takes {requirements.most} at most")
    return _beyond(
        tokens, requirements, "token", (tokens < 0) | (tokens >= (requirements.known or torch.iinfo(tokens.dtype).max))
    )


def _images(images: Tensor, requirements: BatchRequirements) -> Unsuited | None:
    if images.dim() == 4 and images.shape[1] == 3 and images.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return None
    return Unsuited(0, f"is {describe(images[0])}, and {requirements.name} takes float32[3, height, width]")


def _targets(targets: Tensor, requirements: BatchRequirements) -> Unsuited | None:
    what, shape = ("token", "int64[tokens]") if requirements.takes == "tokens" else ("class", "one int64, its class")
    if targets.dtype != torch.int64 or targets.dim() != (2 if what == "token" else 1):
        return Unsuited(0, f"has the target {describe(targets[0])}, and {requirements.name} takes {shape}")
    bad = ((targets < 0) & (targets != IGNORED)) | (targets >= (requirements.known or torch.iinfo(torch.int64).max))
    return _beyond(targets, requirements, f"target: the {what}", bad)


def _beyond(values: Tensor, requirements: BatchRequirements, what: str, bad: Tensor) -> Unsuited | None:
    if not bad.any():
        return None
    sample = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
    value = int(values[sample][bad[sample]].reshape(-1)[0])
    return Unsuited(sample, f"has the {what} {value}, and {requirements.name} accepts {_range(requirements.known)}")


def _range(known: int | None) -> str:
    return "0 or more" if known is None else f"0 to {known - 1}"
