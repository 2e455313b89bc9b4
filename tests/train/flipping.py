"""Runs in which one bit of one rank's state flips, for test_replica_check: one after the other, in folders under the
one that is named.

torchrun --standalone --nproc-per-node 3 -m tests.train.flipping FOLDER (on_two_ranks does it without torchrun)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from launch_train.common.errors import DisagreementError, PreemptedError
from launch_train.distributed import consensus
from launch_train.trainer import replica_check
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run
from tests.train import trials
from tests.train.sharing import Session, run_session

BAD = 5
"""The step in which the bit flips."""

CONFIG: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    "data": "synthetic",
    "steps": 9,
    "batch_size": 6,
    "eval": {"every": 0},
    "optimizer": {"lr": 1e-3, "warmup_steps": 0},
    "log_every": 1,
    "checkpoint": "off",
    "monitor": 0,
}
OFTEN: dict[str, Any] = {"checkpoint": {"minutes": 1e-9, "keep": {"last": 99}}}

What = Literal["parameters", "moments"]


def main(session: Session) -> None:
    consensus.VOTE_SECONDS = 0.0  # a run is over in less
    last = session.ranks.world - 1
    session.train("same")
    with every_step():
        for what, rank in (("parameters", last), ("moments", 0)):
            differs(session, f"{what}-{rank}", what, rank)
        with trials.waiting_for_saves():
            differs(session, "saved", "moments", last, **OFTEN)
    with never(), trials.waiting_for_saves():
        differs(session, "before-save", "parameters", last, **OFTEN)
    with never():
        differs(session, "at-the-end", "moments", last)
        with trials.sigterm_after(BAD):
            differs(session, "preempted", "parameters", last)
    session.train("fsdp", parallel="fsdp")


def differs(session: Session, name: str, what: str, rank: int, **config: Any) -> None:
    with flipped(what, session.ranks.rank == rank), pytest.raises((DisagreementError, PreemptedError)) as caught:
        session.train(name, **config)
    (session.base / f"{name}-exit-{session.ranks.rank}").write_text(str(int(caught.value.exit)))


@contextmanager
def flipped(what: str, here: bool) -> Iterator[None]:
    """Behind the update of step BAD the lowest bit of one number is another one."""
    real = loop.optimizer_step

    def update(run: Run) -> Tensor:
        norm = real(run)
        if here and run.state["step"] + 1 == BAD:
            parameter = run.parameters[1]
            changed = parameter.detach() if what == "parameters" else run.optimizer.state[parameter]["exp_avg_sq"]
            changed.view(torch.int32).view(-1)[3] ^= 1
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "optimizer_step", update)
        yield


@contextmanager
def every_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_check, "MAX_SHARE", 1e9)
        yield


@contextmanager
def never() -> Iterator[None]:
    """After the comparison of the first step the next one is far away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_check, "MAX_SHARE", 1e-9)
        yield


if __name__ == "__main__":
    run_session(CONFIG, main)
