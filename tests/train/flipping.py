"""Runs in which one bit of one rank's state flips, for test_replicas: one after the other, in folders under the one
that is named.

torchrun --standalone --nproc-per-node 3 -m tests.train.flipping FOLDER (on_two_ranks does it without torchrun)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from launch_train.common.config import parse
from launch_train.common.errors import DisagreementError, PreemptedError
from launch_train.distributed import consensus, process_group
from launch_train.trainer import replica_check
from launch_train.trainer import train as loop
from launch_train.trainer.build import Run
from tests.train import trials
from tests.train.sharing import Session

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
OFTEN: dict[str, Any] = {**CONFIG, "checkpoint": {"minutes": 1e-9, "keep": {"last": 99}}}

What = Literal["parameters", "moments"]


def main(base: Path) -> None:
    torch.set_num_threads(1)
    consensus.VOTE_SECONDS = 0.0  # a run is over in less
    session = Session(base, process_group.join(os.environ))
    last = session.ranks.world - 1
    train(session, "same", CONFIG)
    with every_step():
        for what, rank in (("parameters", last), ("moments", 0)):
            differs(session, f"{what}-{rank}", CONFIG, what, rank)
        with trials.waiting_for_saves():
            differs(session, "saved", OFTEN, "moments", last)
    with never(), trials.waiting_for_saves():
        differs(session, "before-save", OFTEN, "parameters", last)
    with never():
        differs(session, "at-the-end", CONFIG, "moments", last)
        with trials.sigterm_after(BAD):
            differs(session, "preempted", CONFIG, "parameters", last)
    train(session, "fsdp", {**CONFIG, "parallel": "fsdp"})
    process_group.finish(session.ranks)


def train(session: Session, name: str, config: dict[str, Any]) -> None:
    loop.train(parse(config), *session.start(name, 0))


def differs(session: Session, name: str, config: dict[str, Any], what: str, rank: int) -> None:
    with flipped(what, session.ranks.rank == rank), pytest.raises((DisagreementError, PreemptedError)) as caught:
        train(session, name, config)
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
    main(Path(sys.argv[1]))
