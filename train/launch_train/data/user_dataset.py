"""Custom map-style datasets, built by a user function: `my_pkg.data:build(split=…, **settings)`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from launch_train.common.errors import TrainError, UsageError
from launch_train.common.user_import import describe_error, load_function
from launch_train.data.batch import Tree
from launch_train.data.map_dataset import Samples, describe
from launch_train.data.sample_order import HELD_OUT, TRAIN, USER_DATASET, generator
from launch_train.data.source import IGNORED, Batch
from launch_train.distributed.process_group import Ranks, barrier, gather, run_once_per_node


def open_own(
    name: str, settings: Mapping[str, Any], *, seed: int, batch_size: int, steps: int, ranks: Ranks
) -> UserSamples:
    """Build the dataset with the user function `name` on each rank.

    The first process of each node builds first, so that the others find its downloads. UsageError is raised on all
    ranks.
    """
    parts: list[tuple[UserDataset, UserDataset | None, str]] = []
    run_once_per_node(ranks, lambda: parts.append(_build(name, settings, seed)))
    error: TrainError | None = None
    if not parts:
        try:
            parts.append(_build(name, settings, seed))
        except TrainError as caught:
            error = caught
    barrier(ranks)  # building may take long
    for failure in gather(ranks, error):
        if failure is not None:
            raise failure
    train, held_out, why = parts[0]
    sizes = gather(ranks, (len(train), None if held_out is None else len(held_out)))
    if len(set(sizes)) > 1:
        listed = ", ".join(
            f"{length} (held out: {'none' if held is None else held})" for length, held in dict.fromkeys(sizes)
        )
        raise UsageError(f"data: {name} gives the ranks datasets of different lengths: {listed}")
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
        return self._validated(super().train(step, share), lambda at: self._train.where(self.drawn(step)[share][at]))

    def held_out(self, index: int, count: int, share: slice) -> Batch:
        return self._validated(super().held_out(index, count, share), lambda at: f"held out, sample {at} of a batch,")

    def _validated(self, batch: Batch, where: Callable[[int], str]) -> Batch:
        if self.requirements is not None and (wrong := unsuited(batch, self.requirements)):
            raise UsageError(f"data: {where(wrong.sample)} {wrong.why}")
        return batch


def _build(name: str, settings: Mapping[str, Any], seed: int) -> tuple[UserDataset, UserDataset | None, str]:
    """Return the training part, and the held-out part or None with the reason why it is missing."""
    build = load_function(name, "data")
    train = UserDataset(build(split="train", **settings), name, seed, TRAIN)
    try:
        held_out = build.function(split="held_out", **settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
        return train, None, describe_error(error)
    if held_out is None:
        return train, None, "it returns None"
    return train, UserDataset(held_out, f"{name}, held out", seed, HELD_OUT), ""


class UserDataset:
    """A custom dataset whose random numbers depend on (seed, epoch, index) only."""

    def __init__(self, dataset: Any, name: str, seed: int, stream: int) -> None:
        """Raises UsageError if `dataset` is not map-style, is empty, or its first sample is invalid."""
        self.name, self._dataset, self._seed, self._stream = name, dataset, seed, stream
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            what = "an iterable one" if hasattr(dataset, "__iter__") else type(dataset).__name__
            raise UsageError(f"data: {name} must return a map-style dataset (with len and [index]), not {what}")
        self._count = self._call(lambda: len(dataset), "len")
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
            pair = self._call(lambda: self._dataset[index], f"[{index}]")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(f"data: {self.where(index)} is {describe(pair)}; a sample is (input, target)")
        return tuple(pair)

    def _call(self, read: Callable[[], Any], what: str) -> Any:
        try:
            return read()
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
    seeds = generator(seed, USER_DATASET + (stream << 8), index, epoch).integers(0, 2**32, 3).tolist()
    torch.default_generator.manual_seed(seeds[0])
    np.random.seed(seeds[1])
    random.seed(seeds[2])
    try:
        yield
    finally:
        torch.set_rng_state(state)
        np.random.set_state(numbers)
        random.setstate(plain)


# --- Validation, on the CPU: on a GPU, a token beyond the vocabulary is an opaque device assert -----------------------


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
    inputs: Any
    inputs, targets = batch
    name, of_tokens = requirements.name, requirements.takes == "tokens"
    if isinstance(inputs, Mapping):
        inputs = inputs.get("input_ids" if of_tokens else "pixel_values")
    if not isinstance(inputs, Tensor):
        return None  # other inputs that a model may accept by name
    misfit = ""
    if not of_tokens:
        is_float = inputs.dtype in (torch.float32, torch.bfloat16, torch.float16)
        if inputs.dim() != 4 or inputs.shape[1] != 3 or not is_float:
            misfit = f"is {describe(inputs[0])}, and {name} takes float32[3, height, width]"
    elif inputs.dim() != 2 or inputs.dtype not in (torch.int64, torch.int32):
        misfit = f"is {describe(inputs[0])}, and {name} takes int64[tokens]"
    elif requirements.most is not None and inputs.shape[1] > requirements.most:
        misfit = f"has {inputs.shape[1]} tokens, and {name} takes {requirements.most} at most"
    elif wrong := _beyond(inputs, requirements, "token"):
        return wrong
    unit, shape = ("token", "int64[tokens]") if of_tokens else ("class", "one int64, its class")
    is_judged = requirements.judges and isinstance(targets, Tensor)
    if not misfit and is_judged and (targets.dtype != torch.int64 or targets.dim() != (2 if of_tokens else 1)):
        misfit = f"has the target {describe(targets[0])}, and {name} takes {shape}"
    if misfit:
        return Unsuited(0, misfit)
    return _beyond(targets, requirements, f"target: the {unit}", ignored=IGNORED) if is_judged else None


def _beyond(values: Tensor, requirements: BatchRequirements, what: str, ignored: int | None = None) -> Unsuited | None:
    """Return the first value that the model doesn't know; `ignored` is none."""
    bad = (values < 0) | (values >= (requirements.known or torch.iinfo(values.dtype).max))
    bad = bad if ignored is None else bad & (values != ignored)
    if not bad.any():
        return None
    sample = int(bad.reshape(len(bad), -1).any(1).nonzero()[0])
    value = int(values[sample][bad[sample]].reshape(-1)[0])
    valid = "0 or more" if requirements.known is None else f"0 to {requirements.known - 1}"
    return Unsuited(sample, f"has the {what} {value}, and {requirements.name} accepts {valid}")
