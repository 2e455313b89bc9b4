"""Map-style datasets (indices 0 to n - 1) as sources. Each epoch is shuffled differently; batches may span epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from launch_train.common.errors import UsageError
from launch_train.common.text import one_line
from launch_train.data.batch import Tree
from launch_train.data.sample_order import samples_of_step
from launch_train.data.source import Batch, Source


class MapDataset(Protocol):
    """A map-style dataset. It must be picklable, because worker processes read it."""

    name: str
    """Name in messages."""

    def __len__(self) -> int: ...

    def item(self, index: int, epoch: int) -> Tree:
        """Return the input and target of a sample: tensors, arrays and numbers, or trees of them, without a batch
        dimension. A pure function of both arguments. Raises UsageError if the sample can't be read."""

    def where(self, index: int) -> str:
        """Describe the sample for messages, such as its file."""


class Samples(Source):
    """A source of shuffled samples, in the order of `launch_train.data.sample_order`."""

    unit = "samples"
    slow = True

    def __init__(
        self,
        train: MapDataset,
        held_out: MapDataset | None,
        *,
        seed: int,
        batch_size: int,
        facts: Mapping[str, Any],
        steps: int,
    ) -> None:
        self._train, self._held_out, self._seed, self._batch_size = train, held_out, seed, batch_size
        self.holds_out = held_out is not None
        self.facts: dict[str, Any] = {
            **facts,
            "data_samples": len(train),
            "data_held_out_samples": len(held_out) if held_out is not None else 0,
            "epochs": round(steps * batch_size / len(train), 3),
        }

    def train(self, step: int, share: slice) -> Batch:
        return collated(self._train, self._samples(step)[share])

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        """Return samples evenly spread over the held-out part; if it has too few, they repeat from the first."""
        if self._held_out is None:
            raise UsageError("data: nothing is held out")
        total, items = count * self._batch_size, self._held_out
        numbers = range(index * self._batch_size, (index + 1) * self._batch_size)[share]
        there = len(items)
        return collated(items, [(k * there // total if total <= there else k % there, 0) for k in numbers])

    def drawn(self, step: int) -> list[int]:
        return [index for index, _ in self._samples(step)]

    def _samples(self, step: int) -> list[tuple[int, int]]:
        """Return index and epoch of each sample of a global batch."""
        return samples_of_step(self._seed, step, self._batch_size, len(self._train))


def collated(items: MapDataset, places: list[tuple[int, int]]) -> Batch:
    """Read samples and stack them into one batch. Raises UsageError if their structures or shapes differ."""
    samples = [items.item(index, epoch) for index, epoch in places]
    whole: Batch = batch(samples, lambda number: items.where(places[number][0]))
    return whole


def batch(samples: list[Tree], where: Any) -> Tree:
    """Stack trees of the same structure into one tree of tensors. `where(number)` names a sample for messages."""
    first = samples[0]
    for number, sample in enumerate(samples):
        if type(sample) is not type(first) or _layout(sample) != _layout(first):
            raise UsageError(
                f"data: {where(number)} is {describe(sample)}, and {where(0)} is {describe(first)}: all samples must "
                "have the same shape and type"
            )
    if isinstance(first, Mapping):
        return {key: batch([sample[key] for sample in samples], where) for key in first}
    if isinstance(first, tuple | list):
        columns = [batch([sample[at] for sample in samples], where) for at in range(len(first))]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    tensors = [tensor(sample, where(number)) for number, sample in enumerate(samples)]
    try:
        return torch.stack(tensors)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"data: {where(0)} and others cannot be stacked into a batch: {one_line(error)}") from error


def _layout(part: Any) -> Any:
    """Return the properties of a tree node that must be the same in all samples."""
    if isinstance(part, Mapping):
        return set(part)
    if isinstance(part, tuple | list):
        return len(part)
    if isinstance(part, Tensor | np.ndarray | np.generic):
        return tuple(part.shape), part.dtype
    return None


def tensor(part: Any, where: str) -> Tensor:
    """Convert a leaf to a tensor. Python numbers get torch's default types. Raises UsageError for other types."""
    if isinstance(part, Tensor):
        return part.detach()
    if isinstance(part, np.ndarray | np.generic):
        try:
            return torch.from_numpy(np.require(part, requirements=["C", "W"]))
        except (TypeError, ValueError) as error:
            raise UsageError(f"data: {where} holds an array of {part.dtype}, which is not numeric") from error
    if isinstance(part, bool | int | float) and (isinstance(part, float) or -(1 << 63) <= part < 1 << 63):
        return torch.tensor(part)
    raise UsageError(f"data: {where} holds {describe(part)}; a batch is made of tensors, arrays and numbers")


def describe(part: Any) -> str:
    """Describe a part of a sample for messages, for example `float32[3, 224, 224]`."""
    if isinstance(part, Tensor | np.ndarray):
        dtype = str(part.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, part.shape))}]"
    if isinstance(part, Mapping):
        return f"a mapping of {', '.join(map(str, part))}"
    if isinstance(part, tuple | list):
        return f"a {type(part).__name__} of {len(part)}"
    return type(part).__name__
