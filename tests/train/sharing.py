"""What several ranks do together in one session of torchrun: runs and their interruptions, one after the other, in
folders under the one that is named. `main` is for test_fsdp; `switches`, `weighing` and `flipping` are other sessions.

torchrun --standalone --nproc-per-node 2 -m tests.train.sharing FOLDER (on_two_ranks does it without torchrun)
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from launch_train import models
from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import PreemptedError
from launch_train.distributed import consensus, process_group
from launch_train.distributed.process_group import Ranks
from launch_train.performance import fsdp, precision
from launch_train.trainer import resume
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run, setup
from tests.train import trials
from tests.train.forked import Forked

CONFIG: dict[str, Any] = {
    **trials.CONFIG,
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 18, "block_size": 15, "vocab_size": 257, "dropout": 0.2},
    "steps": 12,
    "optimizer": {"lr": 1e-2, "warmup_steps": 7},
    "eval": {"every": 5, "batches": 1},
}
"""Parameters that two ranks can't share evenly."""

HALF = 6
"""The step after which a run is preempted: in the middle of warm-up, evaluations and blocks of rows."""

RESNET: dict[str, Any] = {"name": "resnet50", "width": 4, "image_size": 32, "num_classes": 4}
SGD = {"name": "sgd", "lr": 0.1, "warmup_steps": 0}
SHORT: dict[str, Any] = {"steps": 3, "eval": {"every": 3, "batches": 1}, "optimizer": {"lr": 1e-3, "warmup_steps": 0}}


def on_two_ranks(forked: Forked, program: str, base: Path, ranks: int = 2) -> str:
    """What they (or more `ranks`) say to stdout: all of it must go well."""
    done = forked(os.environ | {"OMP_NUM_THREADS": "1"}, ranks, argv=[program, str(base)])
    assert not any(done.codes), done.stdout + done.stderr
    return done.stdout


class Gained(nn.Module):
    """A model with a parameter of one number, of which a second rank has nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x, y) * self.gain.squeeze()
        return loss


@contextmanager
def gained() -> Iterator[None]:
    build = models.build_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_model", lambda config, source=None: Gained(build(config, source)))
        yield


class Session:
    """The runs of this process, by `config`. Each has its own place in the store, as if torchrun had started it."""

    def __init__(self, base: Path, ranks: Ranks, config: dict[str, Any]) -> None:
        self.base, self.ranks, self.config = base, ranks, config

    def start(self, name: str, generation: int) -> tuple[Ranks, dict[str, str]]:
        assert self.ranks.store is not None
        store = PrefixStore(f"{name}/{generation}", self.ranks.store)
        env = {contract.RUN_FOLDER: str(self.base / name), contract.ATTEMPT: "1"}
        return replace(self.ranks, store=store, barriers=itertools.count()), env | {
            contract.GENERATION: str(generation)
        }

    def train(self, name: str, generation: int = 0, **config: Any) -> None:
        loop.train(parse({**self.config, **config}), *self.start(name, generation))

    def preempted(self, name: str, **config: Any) -> None:
        with trials.sigterm_after(HALF), pytest.raises(PreemptedError):
            self.train(name, **config)

    def saved_again(self, source: str, name: str, **config: Any) -> None:
        """Resume a copy of a run folder, and save at once what was read."""
        if self.ranks.rank == 0:
            shutil.copytree(self.base / source, self.base / name)
        process_group.barrier(self.ranks)
        ranks, env = self.start(name, 5)
        run = setup(parse({**self.config, **config}), ranks, env)
        loop.warm_up(run)
        run = resume.resume_or_start(run, env)
        assert run.saver is not None
        run.saver.save(run.state["step"], resume.snapshot(run))
        run.sink.close()
        process_group.barrier(ranks)


def run_session(config: dict[str, Any], work: Callable[[Session], None]) -> None:
    """Be one of its ranks, in the folder that the command line names."""
    torch.set_num_threads(1)
    session = Session(Path(sys.argv[1]), process_group.join(os.environ), config)
    work(session)
    process_group.finish(session.ranks)


def main(session: Session) -> None:
    consensus.VOTE_SECONDS = 0.0  # a run is over in less
    with gained():
        runs(session)
    for kind in ("ddp", "fsdp"):
        session.train(f"bf16-{kind}", parallel=kind, precision="bf16", **SHORT)
        session.train(
            f"resnet-{kind}", parallel=kind, model=RESNET, **{**SHORT, "steps": 2, "eval": {"every": 2, "batches": 1}}
        )
        session.train(f"sgd-{kind}", parallel=kind, **{**SHORT, "optimizer": SGD})
    with infinite_on_rank_1(2):
        session.train("sgd", parallel="fsdp", **{**SHORT, "optimizer": SGD})
    told = json.dumps(by_itself(session.ranks))
    (session.base / f"alone-{session.ranks.rank}.json").write_text(told)


def runs(session: Session) -> None:
    session.train("ddp")
    session.train("fsdp", parallel="fsdp")
    session.preempted("half-ddp")
    session.preempted("half-fsdp", parallel="fsdp")
    session.saved_again("half-fsdp", "fsdp-to-fsdp", parallel="fsdp")
    session.saved_again("half-fsdp", "fsdp-to-ddp")
    session.saved_again("half-ddp", "ddp-to-fsdp", parallel="fsdp")
    session.saved_again("half-one", "one-to-fsdp", parallel="fsdp")
    copied(session, "half-fsdp", "resumed")
    session.train("resumed", 1, parallel="fsdp")
    with gradients_that_do_not_wait():
        session.train("each", parallel="fsdp")
    with infinite_on_rank_1(3):
        session.train("infinite", parallel="fsdp", **{**SHORT, "steps": 4})
        with scaled():
            session.train("scaled", parallel="fsdp", **{**SHORT, "steps": 4})


def copied(session: Session, source: str, name: str) -> None:
    if session.ranks.rank == 0:
        shutil.copytree(session.base / source, session.base / name)
    process_group.barrier(session.ranks)


@contextmanager
def gradients_that_do_not_wait() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "can_defer_gradients", lambda *_: False)
        yield


@contextmanager
def scaled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "scaler", lambda *_: torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5))
        yield


@contextmanager
def infinite_on_rank_1(step: int) -> Iterator[None]:
    """In one step one number of the gradients is infinite, in the part that rank 1 has."""
    real: Callable[[Run], torch.Tensor] = loop.optimizer_step

    def update(run: Run) -> torch.Tensor:
        if run.state["step"] + 1 == step and run.ranks.rank == 1:
            gradient: Any = next(p.grad for p in run.model.parameters() if p.dim() > 1)
            gradient.to_local()[0] = torch.inf
        return real(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", update)
        yield


def by_itself(ranks: Ranks) -> dict[str, Any]:
    """Rank 0 does passes that the other knows nothing of, one of which fails; then both do one together."""
    torch.manual_seed(1)
    model = models.build_model(parse({**CONFIG, "model": {**CONFIG["model"], "dropout": 0.0}}))
    fsdp.shard_model(model, ranks, precision.POLICIES["fp32"], models.blocks(model), moments=2)
    tokens = torch.arange(28).reshape(2, 14)
    before = together(model, tokens)
    failed = passes_alone(model, tokens) if ranks.rank == 0 else None
    return {"before": before, "after": together(model, tokens), "failed": failed}


def together(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad(set_to_none=True)
    return [loss.item(), norm.full_tensor().item()]


def passes_alone(model: nn.Module, tokens: torch.Tensor) -> str:
    """What the one that fails says; it fails in the second block."""
    with fsdp.without_peers(model):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    model.zero_grad(set_to_none=True)
    hook = models.blocks(model)[-1].register_forward_pre_hook(_fail)
    said = ""
    try:
        with fsdp.without_peers(model):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
    except torch.OutOfMemoryError as error:
        said = str(error)
    hook.remove()
    model.zero_grad(set_to_none=True)
    return said


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


if __name__ == "__main__":
    run_session(CONFIG, main)
