"""Runs that are interrupted and go on: in this process, or in one of their own that may be killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launch_train import checkpoint, models, runfolder
from launch_train.checkpointing import multipart_writer
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import PreemptedError
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.performance import precision
from launch_train.runfolder.starts import RunMetrics, parse_metrics
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run

STEPS = 24
CONFIG: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "dropout": 0.2},
    "data": "synthetic",
    "steps": STEPS,
    "batch_size": 8,
    "micro_batch_size": 2,
    "optimizer": {"lr": 1e-2, "warmup_steps": 10},
    "eval": {"every": 7, "batches": 2},
    "log_every": 5,
}
"""With all that a state can have: warm-up, accumulation, dropout, evaluations that don't fall on a block's end."""


def selected_cases(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Return the values of a parameter in those tests of the fixture's file that will run: of the slow ones, a part."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return {item.callspec.params[parameter] for item in items if hasattr(item, "callspec")}


def train(folder: Path | str, generation: int = 0, **config: Any) -> None:
    """Train in this process; `folder` may also be gs://."""
    env = {contract.RUN_FOLDER: str(folder), contract.ATTEMPT: "1", contract.GENERATION: str(generation)}
    loop.train(parse({**CONFIG, **config}), Ranks(), env)


@contextmanager
def sigterm_after(step: int) -> Iterator[None]:
    """SIGTERM to this process while it computes the step after `step`."""
    real = loop.optimizer_step

    def update(run: Any) -> Tensor:
        if run.state["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", update)
        yield


@contextmanager
def waiting_for_saves(then: Callable[[Run], None] = lambda _run: None) -> Iterator[None]:
    """Each step waits until the save that is under way has ended, and then does `then`."""
    real = loop.train_step

    def train_step(run: Run) -> None:
        real(run)
        while run.saver and run.saver._is_saving():
            time.sleep(0.01)
        then(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        yield


def preempted(folder: Path, step: int, generation: int = 0, **config: Any) -> None:
    """Train until a SIGTERM that comes during the step after `step`."""
    with sigterm_after(step), pytest.raises(PreemptedError):
        train(folder, generation, **config)


def read(folder: Path) -> RunMetrics:
    storage = LocalFolder(folder)
    return parse_metrics({name: storage.read(name) for name in storage.list("metrics/")})


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, as a reader of the run folder has it."""
    return {row["step"]: row["loss"] for row in read(folder).rows}


# --- The whole state, compared ---------------------------------------------------------------------------------------

TIMES = frozenset({"loop/seconds", "loop/interruptions", "metrics/seconds"})
"""What is not the same in a run that was interrupted."""


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves by path; a tensor is its bytes."""
    if isinstance(value, Tensor):
        return {path: (str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist())}
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value}
    return {key: leaf for name, item in items for key, leaf in flat(item, f"{path}/{name}".strip("/")).items()}


def differences(one: Path, other: Path | str) -> set[str]:
    """Entries (the first two parts of the path) in which two runs' last checkpoints differ."""
    a, b = (flat(checkpoint.load(str(folder))) for folder in (one, other))
    paths = {path for path in a.keys() | b.keys() if a.get(path) != b.get(path)}
    return {"/".join(path.split("/")[: 4 if path.startswith("ranks") else 2]) for path in paths} - TIMES


class Noisy(nn.Module):
    """A model that draws from every generator: Python's, NumPy's and torch's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() if self.training else 0.0
        loss: Tensor = self.inner(x, y) * (1 + 0.1 * noise)
        return loss


@contextmanager
def noisy_and_scaled() -> Iterator[None]:
    """All entries of the state in use, on the CPU too: a noisy model, and a scaler whose scale grows."""
    build = models.build_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_model", lambda config, source: Noisy(build(config, source)))
        patch.setattr(precision, "scaler", lambda *_: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5))
        yield


# --- In a separate process -------------------------------------------------------------------------------------------

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["launch_train.trainer.train", "torch._dynamo", "tensorboard.summary.writer.event_file_writer"]
)


class Effects:
    """What a run does to its checkpoints; kills the process at the so-manieth of a kind, before it or after it.

    Kinds: take and point (LATEST: the first time, and later), part, manifest, delete.
    """

    VERBS = ("write", "swap", "delete")

    def __init__(self, kind: str, number: int, after: bool) -> None:
        self.kind, self.number, self.after, self.counts = kind, number, after, Counter[str]()

    def wrap(self, verb: str) -> Any:
        real = getattr(LocalFolder, verb)

        def effect(folder: LocalFolder, name: str, *args: Any, **options: Any) -> Any:
            hit = self.hits(verb, name)
            if hit and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(folder, name, *args, **options)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return effect

    def hits(self, verb: str, name: str) -> bool:
        if not name.startswith("checkpoints/"):
            return False
        kind = verb if verb == "delete" else "manifest" if name.endswith("manifest.json") else "part"
        if name == runfolder.LATEST:
            kind = "point" if self.counts["take"] else "take"
        self.counts[kind] += 1
        return (kind, self.counts[kind]) == (self.kind, self.number)


def _child(folder: str, kill: tuple[str, int, bool] | None, generation: int, config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    multipart_writer.PART_BYTES = 1 << 15  # several parts in each save
    if kill:
        effects = Effects(*kill)
        for verb in Effects.VERBS:
            setattr(LocalFolder, verb, effects.wrap(verb))
    with waiting_for_saves() if kill else nullcontext():  # the last save cancels one that still runs, and its effects
        train(Path(folder), generation, **config)
    os._exit(0)


def in_a_child(folder: Path, generation: int, kill: tuple[str, int, bool] | None, config: dict[str, Any]) -> None:
    """Train in a separate process, which is killed at an effect (kind, number, after it)."""
    child = _CONTEXT.Process(target=_child, args=(str(folder), kill, generation, config))
    child.start()
    child.join(60)
    assert child.exitcode == (-signal.SIGKILL if kill else 0)
