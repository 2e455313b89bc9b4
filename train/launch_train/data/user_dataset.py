"""Custom map-style datasets, built by a user function: `my_pkg.data:build(split=…, **settings)`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launch_train.common.errors import TrainError, UsageError
from launch_train.common.user_import import describe_error, load
from launch_train.data.batch import Tree
from launch_train.data.map_dataset import Samples, describe
from launch_train.data.sample_order import HELD_OUT, TRAIN, USER_DATASET, generator
from launch_train.data.source import Batch
from launch_train.data.validation import BatchRequirements, unsuited
from launch_train.distributed.process_group import Ranks, barrier, gather, run_once_per_node


def open_own(
    name: str, settings: Mapping[str, Any], *, seed: int, batch_size: int, steps: int, ranks: Ranks
) -> UserSamples:
    """Build the dataset with the user function `name` on each rank.

    The first process of each node builds first, so that the others find its downloads. UsageError is raised on all
    ranks.
    """
    built = dict[str, Any]()

    def work() -> None:
        built["it"] = _built(name, settings, seed)

    run_once_per_node(ranks, work)
    _alike(ranks, work if ranks.local_rank else lambda: None)
    train, held_out, why = built["it"]
    sizes = gather(ranks, (len(train), None if held_out is None else len(held_out)))
    if len(set(sizes)) > 1:
        raise UsageError(f"data: {name} gives the ranks datasets of different lengths: {_listed(sizes)}")
    if held_out is None and ranks.rank == 0:
        print(f"data: {name} provides no held_out data ({why}); evaluation is off", flush=True)
    return UserSamples(train, held_out, seed=seed, batch_size=batch_size, facts={"data": name}, steps=steps)


class UserSamples(Samples):
    """A source of custom samples.

    Batches are validated against `requirements`, the inputs that the model accepts, set once the model is built.
    """

    requirements: BatchRequirements | None = None

    def __init__(self, train: UserDataset, held_out: UserDataset | None, **settings: Any) -> None:
        super().__init__(train, held_out, **settings)
        self.targets = train.targets

    def train(self, step: int, share: slice) -> Batch:
        return self._looked_at(super().train(step, share), lambda at: self._named(step, share)[at])

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._looked_at(super().held_out(index, count, share), lambda at: f"held out, sample {at} of a batch,")

    def _named(self, step: int, share: slice) -> list[str]:
        return [self._train.where(place) for place in self.drawn(step)[share]]

    def _looked_at(self, batch: Batch, where: Callable[[int], str]) -> Batch:
        if self.requirements is not None and (wrong := unsuited(batch, self.requirements)):
            raise UsageError(f"data: {where(wrong.sample)} {wrong.why}")
        return batch


def _listed(sizes: Sequence[tuple[int, int | None]]) -> str:
    """Format the distinct sizes, for example `12 (held out: 3), 12 (held out: none)`."""
    said = [f"{train} (held out: {'none' if held_out is None else held_out})" for train, held_out in sizes]
    return ", ".join(dict.fromkeys(said))


def _alike(ranks: Ranks, work: Callable[[], None]) -> None:
    """Run `work` on every rank; if it fails on any rank, raise that error on all ranks."""
    error: TrainError | None = None
    try:
        work()
    except TrainError as caught:
        error = caught
    barrier(ranks)  # `work` may take long
    for theirs in gather(ranks, error):
        if theirs is not None:
            raise theirs


def _built(name: str, settings: Mapping[str, Any], seed: int) -> tuple[UserDataset, UserDataset | None, str]:
    """Return the training part, and the held-out part or None with the reason why it is missing."""
    build = load(name, "data")
    train = UserDataset(build(split="train", **settings), name, seed, TRAIN)
    try:
        found = build.function(split="held_out", **settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        return train, None, describe_error(error)
    if found is None:
        return train, None, "it returns None"
    return train, UserDataset(found, f"{name}, held out", seed, HELD_OUT), ""


class UserDataset:
    """A custom dataset whose random numbers depend on (seed, epoch, index) only."""

    def __init__(self, dataset: Any, name: str, seed: int, stream: int) -> None:
        """Raises UsageError if `dataset` is not map-style, is empty, or its first sample is invalid."""
        self.name, self._dataset, self._seed, self._stream = name, dataset, seed, stream
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            what = "an iterable one" if hasattr(dataset, "__iter__") else type(dataset).__name__
            raise UsageError(f"data: {name} must return a map-style dataset (with len and [index]), not {what}")
        self._count = self._asked(lambda: len(dataset), "len")
        if not self._count:
            raise UsageError(f"data: {name} is empty")
        _, target = self.item(0, 0)
        self.targets = max(1, math.prod(target.shape)) if isinstance(target, Tensor | np.ndarray) else 1

    def __len__(self) -> int:
        return int(self._count)

    def where(self, index: int) -> str:
        return f"{self.name}[{index}]"

    def item(self, index: int, epoch: int) -> Tree:
        with seeded(self._seed, self._stream, epoch, index):
            pair = self._asked(lambda: self._dataset[index], f"[{index}]")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"data: {self.where(index)} is {describe(pair)}; a sample is (input, target)")
        return tuple(pair)

    def _asked(self, ask: Callable[[], Any], what: str) -> Any:
        try:
            return ask()
        except TrainError:
            raise
        except (Exception, SystemExit) as error:
            raise UsageError(f"data: {self.name} {what} failed {describe_error(error)}") from error


@contextmanager
def seeded(seed: int, stream: int, epoch: int, index: int) -> Iterator[None]:
    """Return a context that seeds the generators of torch, NumPy and Python for one sample, and restores them on exit.

    The random numbers of training must not depend on which process prepares the samples.
    """
    state: Tensor = torch.get_rng_state()
    numbers, plain = np.random.get_state(), random.getstate()
    drawn = [int(one) for one in generator(seed, USER_DATASET + (stream << 8), index, epoch).integers(0, 2**32, 3)]
    torch.default_generator.manual_seed(drawn[0])
    np.random.seed(drawn[1])
    random.seed(drawn[2])
    try:
        yield
    finally:
        torch.set_rng_state(state)
        np.random.set_state(numbers)
        random.setstate(plain)
