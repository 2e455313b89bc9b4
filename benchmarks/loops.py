"""Training loops compared by `benchmarks.training`, with the same model, optimizer and data in each.

python -m benchmarks.loops plain|trainer|accelerate|fabric JSON
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain_loop, turns
from benchmarks.plain_loop import Job
from launch_train.common.config import Gpt


def main() -> None:
    fields = json.loads(sys.argv[2])
    {"plain": plain, "trainer": trainer, "accelerate": accelerate, "fabric": fabric}[sys.argv[1]](fields)


def job(fields: Mapping[str, Any]) -> Job:
    """Build the job from its JSON form."""
    own = {key: value for key, value in fields.items() if key in Job.__dataclass_fields__}
    return Job(**{**own, "text": Path(fields["text"]), "shape": Gpt(**fields["shape"])})


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def plain(fields: Mapping[str, Any]) -> None:
    rank, world = place()
    if world > 1:
        torch.distributed.init_process_group("gloo")
    plain_loop.train(job(fields), rank, world, turns.here().step)


def trainer(fields: Mapping[str, Any]) -> None:
    """Run the built-in trainer like `python -m launch_train`.

    `fields["config"]` is run.config. It writes to the run folder of its environment, if there is one.
    """
    from launch_train import __main__ as program
    from launch_train.common import contract
    from launch_train.trainer import train

    mine, left_to_do = turns.here(), train.has_work_left

    def waited(run: Any) -> bool:
        mine.step()
        return left_to_do(run)

    train.has_work_left = waited
    os.environ[contract.CONFIG] = json.dumps(fields["config"])
    program.main()


def accelerate(fields: Mapping[str, Any]) -> None:
    """Run a loop with Hugging Face Accelerate, written as in its documentation."""
    from accelerate import Accelerator

    (rank, world), what, mine = place(), job(fields), turns.here()
    precision = "bf16" if what.precision == "bf16" else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
    bare = plain_loop.build(what)
    model: Any
    model, optimizer = accelerator.prepare(bare, plain_loop.adamw(bare, what))
    model = torch.compile(model) if what.compile else model
    scheduler = accelerator.prepare(_schedule(optimizer, what))
    text = plain_loop.training_part(what)
    for step in range(1, what.steps + 1):
        mine.step()
        x, y = plain_loop.batch(text, step, what, rank, world)
        loss = model(x.to(accelerator.device), y.to(accelerator.device))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), what.grad_clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def fabric(fields: Mapping[str, Any]) -> None:
    """Run a loop with Lightning Fabric, written as in its documentation."""
    from lightning_fabric import Fabric

    (rank, world), what, mine = place(), job(fields), turns.here()
    strategy, precision = "ddp" if world > 1 else "auto", "bf16-mixed" if what.precision == "bf16" else "32-true"
    lightning = Fabric(accelerator="auto", devices=world, strategy=strategy, precision=precision)
    lightning.launch()
    bare = plain_loop.build(what)
    optimizer = plain_loop.adamw(bare, what)
    model, optimizer = lightning.setup(torch.compile(bare) if what.compile else bare, optimizer)
    scheduler = _schedule(optimizer, what)
    text = plain_loop.training_part(what)
    for step in range(1, what.steps + 1):
        mine.step()
        x, y = plain_loop.batch(text, step, what, rank, world)
        loss = model(lightning.to_device(x), lightning.to_device(y))
        lightning.backward(loss)
        lightning.clip_gradients(model, optimizer, max_norm=what.grad_clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _schedule(optimizer: Any, what: Job) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: plain_loop.rate(done + 1, what) / what.lr)


if __name__ == "__main__":
    main()
