"""What two ranks do together in one session of torchrun, for test_prepare_model, test_compile,
test_micro_batch and test_determinism: one run after the other, in folders under the one that is named.

torchrun --standalone --nproc-per-node 2 -m tests.train.switches FOLDER (on_two_ranks does it without torchrun)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launch_train import models
from launch_train.common.errors import DisagreementError, TrainError, UsageError
from launch_train.distributed.process_group import Ranks
from launch_train.performance import compile as compiling
from launch_train.trainer import replica_check
from launch_train.trainer import train as loop
from tests.train.sharing import Session, run_session

GPT: dict[str, Any] = {"n_layer": 3, "n_head": 2, "n_embd": 16, "block_size": 16, "dropout": 0.2}
CONFIG: dict[str, Any] = {
    "model": GPT,
    "data": "synthetic",
    "steps": 4,
    "batch_size": 8,
    "micro_batch_size": 2,
    "eval": {"every": 4, "batches": 1},
}
COMPILED: dict[str, Any] = {"model": {**GPT, "dropout": 0.0}, "batch_size": 4, "micro_batch_size": 1}
LESS: dict[str, Any] = {"steps": 8, "micro_batch_size": 4, "eval": {"every": 0}, "model": {**GPT, "dropout": 0.0}}

RESNET: dict[str, Any] = {
    **CONFIG,
    "model": {"name": "resnet50", "width": 4, "image_size": 32, "num_classes": 4},
    "eval": {"every": 6, "batches": 2},
    "optimizer": {"lr": 0.1, "warmup_steps": 0},
}

SMALL, PASS = 2, 7
"""The samples that rank 1 has memory for from this pass on: two of the warm-up, and four steps."""


class Spare(nn.Module):
    """Has parameters that get no gradient: never, or (`late`) from the sixth pass on."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.spare, self.late, self.passes = nn.Linear(8, 8), late, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.passes += 1
        hidden = self.tokens(x)
        if self.late and self.passes < 6:
            hidden = hidden + self.spare(hidden)
        return nn.functional.cross_entropy(self.out(hidden).flatten(0, 1), y.flatten())


class Scarce(nn.Module):
    """A model whose memory has become small on rank 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.passes += 1
        if os.environ["RANK"] == "1" and self.passes >= PASS and len(x) > SMALL:
            raise torch.OutOfMemoryError("CUDA out of memory")
        loss: Tensor = self.inner(x, y)
        return loss


def main(session: Session) -> None:
    session.train("plain")
    session.train("selective", activation_checkpointing="selective")
    session.train("own-ddp", ddp={"bucket_mib": 7, "static_graph": False, "gradient_as_bucket_view": False})
    session.train("enough", **LESS)
    with scarce():
        session.train("scarce", **LESS)
    session.train("resnet", **RESNET)
    compile_(session)
    spare: dict[str, Any] = {
        "data": {"path": "synthetic", "block_size": 8},
        "micro_batch_size": 1,
        "eval": {"every": 0},
        "steps": 6,
    }
    session.train("never", model={"name": f"{__name__}:Spare", "late": False}, **spare)
    with told(session, "no-longer", UsageError):
        session.train("no-longer", model={"name": f"{__name__}:Spare", "late": True}, **spare)
    with told(session, "disagreed", DisagreementError), parameters_changed_behind_ddps_back(session):
        session.train("disagreed", steps=2)


@contextmanager
def told(session: Session, name: str, kind: type[TrainError]) -> Iterator[None]:
    """A run fails so on each rank, which notes what it says."""
    with pytest.raises(kind) as caught:
        yield
    (session.base / f"{name}-{session.ranks.rank}").write_text(str(caught.value))


@contextmanager
def parameters_changed_behind_ddps_back(session: Session) -> Iterator[None]:
    """On rank 1, before the end."""
    real = replica_check.parameters_sha256

    def changed(model: nn.Module, ranks: Ranks) -> str:
        if session.ranks.rank == 1:
            next(model.parameters()).data.add_(1)
        return real(model, ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "parameters_sha256", changed)
        yield


def compile_(session: Session) -> None:
    """With a compiler that makes no machine code, or one that fails on rank 1."""
    session.train("uncompiled", **COMPILED)
    with compiler("aot_eager", most=0.0):
        session.train("compiled", compile=True, activation_checkpointing="selective", **COMPILED)
        session.train("compiled-shared", compile=True, parallel="fsdp", **COMPILED)
    for mode, most in (("regional", 0.0), ("whole", 1.0)):
        with compiler(_fails if session.ranks.rank == 1 else "aot_eager", most):
            session.train(f"failed-{mode}", compile=True, **COMPILED)


@contextmanager
def compiler(backend: Any, most: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "BACKEND", backend)
        patch.setattr(compiling, "MIN_BLOCK_SHARE", most)
        yield
    torch._dynamo.reset()


def _fails(_graph: Any, _inputs: Any) -> None:
    raise RuntimeError("out of registers")


@contextmanager
def scarce() -> Iterator[None]:
    build = models.build_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_model", lambda config, source=None: Scarce(build(config, source)))
        yield


if __name__ == "__main__":
    run_session(CONFIG, main)
