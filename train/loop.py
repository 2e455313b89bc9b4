"""Training, told from top to bottom.

torchrun --standalone --nproc-per-node 2 -m train
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from train import checkpoint, optim, progress
from train.config import Config
from train.digest import disagreement, parameters_sha256
from train.dist import Ranks, gather, mean, meet, same_buffers
from train.ending import heeding_sigterm
from train.errors import DisagreementError
from train.metrics import Row
from train.precision import autocast
from train.setup import Run, setup
from train.storage import Storage

SAVE_SECONDS = 10.0
"""What the last rows get after an error: less than a process has after SIGTERM (Timing.grace)."""


def train(config: Config, ranks: Ranks, env: Mapping[str, str]) -> None:
    """Train as `config` says.

    Raises UsageError and DisagreementError on every rank alike, OutputError on rank 0, which alone writes, and
    SystemExit (143) after SIGTERM.
    """
    run = setup(config, ranks, env)
    with heeding_sigterm() as told:
        try:
            run.sink.put([_event("start", **run.facts)])
            for step in range(1, config.steps + 1):
                train_step(run, step)
                if run.recorder.due(step, config.log_every) or step == config.steps:
                    report(run)
                if config.eval.every and (step % config.eval.every == 0 or step == config.steps):
                    evaluate(run, step)
                told.obey()
            conclude(run)
        except BaseException:
            save_rows(run)
            told.obey()  # what failed then is a rank that has gone already
            raise
        run.sink.close()
        meet(ranks)  # rank 0 may still be writing the last checkpoint, and does so to the end


def train_step(run: Run, step: int) -> None:
    """One global batch: forward and backward in micro-batches, one update. Nothing here waits for the device."""
    run.watch.start()
    rate = optim.learning_rate(step, run.config.steps, run.config.optimizer)
    optim.set_rate(run.optimizer, rate)
    loss = gradients(run, step)
    norm = update(run)
    run.watch.stop()
    run.recorder.add(step, rate, loss, norm)
    run.state["step"] = step


def gradients(run: Run, step: int) -> Tensor:
    """Add up the gradients of this rank's share; the last backward averages them over the ranks. Returns the loss."""
    inputs, targets = run.source.train(step, run.share)
    parts = micro_batches(inputs, targets, run.micro_batch)
    total = torch.zeros((), device=run.ranks.device)
    for number, (x, y) in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else run.no_sync():
            with autocast(run.numbers, run.ranks.device):
                loss = run.forward(x, y) / len(parts)
            run.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def micro_batches(inputs: Tensor, targets: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(inputs, size), torch.split(targets, size), strict=True))


def update(run: Run) -> Tensor:
    """Clip, step, forget the gradients. Returns the norm before clipping."""
    run.scaler.unscale_(run.optimizer)
    norm = clip_grad_norm_(run.model.parameters(), run.config.optimizer.grad_clip or float("inf"))
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


def report(run: Run) -> None:
    """Write the block of rows, and now and then a line."""
    rows = run.recorder.block()
    run.sink.put(rows)
    last, now = rows[-1], time.monotonic()
    if run.ranks.rank == 0 and (now - run.state["spoke"] >= 1 or last["step"] == run.config.steps):
        run.state["spoke"] = now
        left = run.recorder.step_seconds() * (run.config.steps - last["step"])
        print(progress.line(last, run.config.steps, run.source.unit, left), flush=True)


@torch.no_grad()
def evaluate(run: Run, step: int) -> None:
    """The mean loss on held-out batches, the same ones each time, shared among the ranks."""
    same_buffers(run.ranks, run.model)
    batches, total = run.config.eval.batches, torch.zeros((), device=run.ranks.device)
    run.model.eval()
    for index in range(batches):
        inputs, targets = run.source.held_out(index, batches, run.share)
        parts = micro_batches(inputs, targets, run.micro_batch)
        for x, y in parts:
            with autocast(run.numbers, run.ranks.device):
                total += run.model(x, y) / len(parts)
    run.model.train()
    run.state["eval_loss"] = mean(run.ranks, total / batches).item()
    run.sink.put([_event("eval", step=step, loss=run.state["eval_loss"])])
    if run.ranks.rank == 0:
        print(f"step {step}/{run.config.steps}  held-out loss {run.state['eval_loss']:.4f}", flush=True)


def conclude(run: Run) -> None:
    """All ranks must have come to the same parameters; then rank 0 writes the checkpoint and the summary."""
    same_buffers(run.ranks, run.model)  # the reported held-out loss is that of the model that is saved
    digest = parameters_sha256(run.model)
    seconds = time.monotonic() - run.state["began"]
    if wrong := disagreement(gather(run.ranks, digest)):
        raise DisagreementError(wrong)
    if run.ranks.rank:
        return
    end = run.facts | run.recorder.totals() | {"parameters_sha256": digest, "seconds": seconds}
    end |= {"step": run.state["step"], "eval_loss": run.state["eval_loss"]}
    if run.storage:
        path = save_checkpoint(run, run.storage, digest)
        run.sink.put([_event("checkpoint", step=run.state["step"], path=path)])
    run.sink.put([_event("end", **end)])
    print(progress.summary(end, run.source.unit, run.storage.url if run.storage else None), flush=True)


def save_checkpoint(run: Run, storage: Storage, digest: str) -> str:
    state = {"model": run.model.state_dict(), "step": run.state["step"]}
    about = {"config": run.facts["config"], "parameters_sha256": digest}
    return checkpoint.save(storage, run.state["step"], state, about, writer=run.start_name)


def save_rows(run: Run) -> None:
    """After an error: what was recorded is written, if that still works; the error itself matters more.

    From a thread, which is not waited for too long: a GPU that waits for a dead rank never answers.
    """
    if run.ranks.rank == 0:
        saving = Thread(target=_save_rows, args=(run,), name="last rows", daemon=True)
        saving.start()
        saving.join(SAVE_SECONDS)


def _save_rows(run: Run) -> None:
    with suppress(Exception):
        run.sink.put(run.recorder.block(alone=True))
    with suppress(Exception):
        run.sink.close()


def _event(name: str, **fields: Any) -> Row:
    return {"event": name, "time": time.time(), **fields}
