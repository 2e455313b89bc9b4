"""Ranks that are preempted while one of them takes long over one thing. Jobs are as for tests.train.forking; in their
environment PAUSE_IN is one of PHASES, and PAUSE_RANK who pauses. Every rank gets SIGTERM as the step, or the
evaluation, begins.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tests.train.forking import main

PAUSE, LONG_PAUSE = 1.5, 16.0
PHASES = {
    "data": (5, "data"),
    "forward": (5, "forward"),
    "backward": (5, "backward"),
    "compile": (1, "forward"),
    "evaluation": (7, "evaluation"),
}
"""The step in which the pause is, and where: what is compiled is so in the first step's forward pass."""

step = 0
"""Which the rank is in; -1 once it has paused."""


def pause(where: str) -> None:
    global step  # noqa: PLW0603 - of the rank's process
    if (step, where) == PHASES[os.environ["PAUSE_IN"]] and os.environ["RANK"] == os.environ["PAUSE_RANK"]:
        step = -1
        time.sleep(LONG_PAUSE if os.environ.get("LONG") else PAUSE)


def begin(number: int, evaluates: bool) -> None:
    global step  # noqa: PLW0603 - of the rank's process
    due, where = PHASES[os.environ["PAUSE_IN"]]
    step = number
    if step == due and evaluates == (where == "evaluation"):
        Path(os.environ["LAUNCH_NOTICE"]).touch()
        os.kill(os.getpid(), signal.SIGTERM)


class Pausing(nn.Module):
    """A model whose passes may take long."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pause("forward" if self.training else "evaluation")
        loss: Tensor = self.inner(x, y)
        if loss.requires_grad:
            loss.register_hook(lambda _gradient: pause("backward"))  # type: ignore[no-untyped-call]  # torch has no types here
        return loss


def patch() -> None:
    """In the server, before it forks a rank."""
    from launch_train import models
    from launch_train.data.loader import BatchLoader
    from launch_train.distributed import consensus
    from launch_train.performance import optimizer
    from launch_train.trainer import shutdown
    from launch_train.trainer import train as loop

    consensus.VOTE_SECONDS = 0.0  # the run is over in less
    shutdown.PEER_SECONDS = 0.3  # type: ignore[attr-defined]  # a rank whose peer has failed gets less than the pause
    build, rate, evaluate, train = models.build_model, optimizer.learning_rate, loop.evaluate, BatchLoader.train

    def learning_rate(number: int, *rest: Any) -> float:
        begin(number, evaluates=False)
        return rate(number, *rest)

    def evaluated(run: Any, told: Any) -> None:
        begin(run.state["step"], evaluates=True)
        evaluate(run, told)

    def batch(batch_loader: BatchLoader, number: int) -> Any:
        pause("data")
        return train(batch_loader, number)

    for module, name, new in (
        (models, "build_model", lambda config, source=None: Pausing(build(config, source))),
        (optimizer, "learning_rate", learning_rate),
        (loop, "evaluate", evaluated),
        (BatchLoader, "train", batch),
    ):
        setattr(module, name, new)


if __name__ == "__main__":
    patch()
    main([])
