"""Training, told from top to bottom.

torchrun --standalone --nproc-per-node 2 -m train
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, reduce
from math import inf

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from launch_train.common import console, contract, faults
from launch_train.common.config import Config
from launch_train.common.errors import DisagreementError, SupersededError, TrainError
from launch_train.common.process_exit import ShutdownSignal, catch_sigterm
from launch_train.data.batch import split
from launch_train.data.source import Batch
from launch_train.distributed.consensus import StepVote
from launch_train.distributed.dtensor import full_tensor
from launch_train.distributed.peers import Peers
from launch_train.distributed.process_group import (
    WATCHED_SECONDS,
    Ranks,
    barrier,
    broadcast_buffers,
    gather,
    raise_timeout,
)
from launch_train.performance import attention, grad_guard, loss_normalization, micro_batch, optimizer, prepare_model
from launch_train.performance.precision import autocast
from launch_train.trainer.build import Run, seed, setup
from launch_train.trainer.metrics_buffer import Step
from launch_train.trainer.parameters_digest import disagreement, parameters_sha256
from launch_train.trainer.reporting import block, compare_now, event, report_if_due, tell_start
from launch_train.trainer.resume import begin, to_save
from launch_train.trainer.shutdown import give_way, leave_if_stuck, save_rows
from launch_train.trainer.warmup import no_trace

WARM_UP_STEPS = 2

HANG_STEPS = 10
"""A step counts as hung when it takes this many times as long as recent steps."""
STEP_SECONDS, DATA_SECONDS, RARE_SECONDS = 60.0, 600.0, 1800.0
"""Minimum for a step, for one that waits for its data, and for rare work: a compilation, a checkpoint."""

UNFINISHED = "Expected to have finished reduction"
"""What DDP says in a forward pass if the backward pass before it broke off after it had begun to speak to the peers."""


def train(config: Config, ranks: Ranks, env: Mapping[str, str]) -> None:
    """Train as `config` says, from the newest checkpoint of the run folder if it has one.

    Raises on every rank alike: UsageError, DisagreementError, SupersededError, PreemptedError (all is saved). On rank
    0, which alone writes the rows, OutputError. On a rank whose memory runs out OutOfMemoryError. SystemExit (143)
    after a SIGTERM that a peer's failure sent, or that left no time to save.
    """
    device = ranks.device.type
    with micro_batch.in_words(ranks), attention.kernel(attention.chosen(config, device), device):
        run = setup(config, ranks, env)
        if env.get(contract.WATCH) and config.hang_after != "off":
            own = 0.0 if config.hang_after == "auto" else config.hang_after
            raise_timeout(timedelta(seconds=WATCHED_SECONDS + own))
        warm_up(run)
        run = begin(run, env)
        with catch_sigterm(env, partial(leave_if_stuck, run, Peers(ranks))) as told:
            to_the_end(run, told)


def to_the_end(run: Run, told: ShutdownSignal) -> None:
    """All steps that are left, with their evaluations and checkpoints."""
    try:
        tell_start(run)
        run.profiler.start()
        while left_to_do(run):
            if run.state["eval_due"]:
                with run.profiler.range("evaluation"):
                    evaluate(run, told)
            else:
                train_step(run)
                report_if_due(run)
            boundary(run, told)
        conclude(run, told)
    except BaseException as error:
        if run.saver:
            run.saver.cancel()
        save_rows(run)
        if told.signum and not isinstance(error, TrainError):  # what failed then is a rank that has gone already
            raise SystemExit(128 + told.signum) from error
        raise
    finally:
        run.heartbeat.expect(inf)
        run.feed.close()
        run.profiler.close()
        run.monitor.close()
    run.sink.close()
    barrier(run.ranks)  # rank 0 may still be writing the last rows, and does so to the end


def warm_up(run: Run) -> None:
    """Steps that leave no trace. After its first backward pass (a static graph: its second) DDP puts the gradients into
    other buckets, and so adds them in another order: a run that begins, and one that goes on, have both behind them."""
    if run.ranks.world == 1:
        return
    batch = run.feed.once(1)
    with no_trace(run.model):
        for _ in range(WARM_UP_STEPS):
            first_gradients(run, batch)
            run.optimizer.zero_grad(set_to_none=True)
    seed(run.config, run.ranks)


def first_gradients(run: Run, batch: Batch) -> None:
    """In a static graph's first pass DDP counts gradients: if the memory runs out, none can be done again."""
    before = run.portions.size
    try:
        with micro_batch.by_its_name():
            gradients(run, batch)
    except torch.OutOfMemoryError as error:
        if run.portions.halve():
            micro_batch.learn(run.storage, run.portions.size)
        raise micro_batch.given_up(run.portions, before, run.ranks) from error


def left_to_do(run: Run) -> bool:
    return not run.is_done


def train_step(run: Run) -> None:
    """One global batch: forward and backward in micro-batches, one update. Nothing here waits for the device."""
    step, every = run.state["step"] + 1, run.config.eval.every
    run.watch.start()
    rate = optimizer.learning_rate(step, run.config.steps, run.config.optimizer)
    optimizer.set_rate(run.optimizer, rate)
    expect(run, DATA_SECONDS)
    with run.profiler.range("data"):
        batch = run.feed.train(run.state["samples"] // run.config.batch_size + 1)
    expect(run)
    loss = gradients_that_fit(run, batch)
    with run.profiler.range("optimizer"):
        loss = loss_normalization.normalised(run.ranks, run.parameters, loss)
        norm = update(run)
    run.watch.stop()
    run.recorder.add(Step(step, rate, loss, norm, run.feed.waited(), not run.profiler.records, run.portions.size))
    run.profiler.stepped(step)
    run.state["step"] = step
    faults.record_step(step)
    run.state["samples"] += run.config.batch_size
    run.state["eval_due"] = bool(every) and (step % every == 0 or step == run.config.steps)


def gradients_that_fit(run: Run, batch: Batch) -> Tensor:
    """The same, with smaller micro-batches if the memory runs out. Raises OutOfMemoryError: here that can't help."""
    said, before = "", run.portions.size
    while True:
        was, before = before, run.portions.size
        try:
            with micro_batch.by_its_name():
                return gradients(run, batch)
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0]
        except RuntimeError as error:
            if not said or UNFINISHED not in str(error):
                if unused := prepare_model.explained(error, run.model):
                    raise unused from error
                raise
            raise micro_batch.given_up(run.portions, was, run.ranks) from error
        # Not in the handler, where the traceback still holds the tensors of the step.
        run.optimizer.zero_grad(set_to_none=True)
        micro_batch.free(run.ranks.device)
        less(run, before, said)


def less(run: Run, before: int, said: str) -> None:
    """Go on with smaller micro-batches; the starts to come do so too. Raises OutOfMemoryError if the step can't be done
    again here."""
    expect(run, RARE_SECONDS)  # they may have to be compiled
    fits = micro_batch.again(run.portions, run.model, run.ranks)
    step, size = run.state["step"] + 1, run.portions.size
    if size < before:
        micro_batch.learn(run.storage, size)
        print(f"step {step}: out of memory with micro-batches of {before}, now {size}: {said[:100]}", flush=True)
    if not fits:
        raise micro_batch.given_up(run.portions, before, run.ranks)


def gradients(run: Run, batch: Batch) -> Tensor:
    """Add up the gradients of this rank's share; the last backward averages them over the ranks. Returns the loss, as
    `counted.loss_of`."""
    parts = split(batch, run.portions.size)
    losses: list[Tensor] = []
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else run.no_sync():
            with run.profiler.range("forward"), autocast(run.numbers, run.ranks.device):
                loss = loss_normalization.loss_of(run.forward, part, run.targets)
                loss = loss / len(parts) if len(parts) > 1 else loss
            with run.profiler.range("backward"):
                run.scaler.scale(loss_normalization.differentiated(loss)).backward()
        losses.append(loss.detach().clone())  # a CUDA graph writes the next one to the same place
    return reduce(torch.add, losses)


def update(run: Run) -> Tensor:
    """Clip, step, forget the gradients. Returns the norm before clipping."""
    run.scaler.unscale_(run.optimizer)
    norm = full_tensor(clip_grad_norm_(run.parameters, run.config.optimizer.grad_clip or float("inf")))
    if not run.scaler.is_enabled():  # which does that by itself
        grad_guard.skip_unless_finite(run.optimizer, norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def evaluate(run: Run, told: ShutdownSignal) -> None:
    """The mean loss on held-out batches, the same ones each time, shared among the ranks."""
    expect(run, RARE_SECONDS)  # the first batch may be the first of all, and be compiled
    broadcast_buffers(run.ranks, run.model)
    batches, total = run.config.eval.batches, torch.zeros((2,) if run.targets else (), device=run.ranks.device)
    run.model.eval()
    for index in range(batches):
        if index:
            expect(run, DATA_SECONDS)
        batch = run.feed.held_out(index, batches)
        if index:
            expect(run)
        parts = split(batch, run.portions.size)
        for part in parts:
            with autocast(run.numbers, run.ranks.device):
                total += loss_normalization.loss_of(run.evaluated, part, run.targets) / len(parts)
        boundary(run, told)  # a preemption doesn't wait for an evaluation, which begins again after it
        if run.saver:
            run.saver.note_evaluation()
    run.model.train()
    step, run.state["eval_due"] = run.state["step"], False
    run.state["eval_loss"] = loss_normalization.mean_over_all(run.ranks, total / batches).item()
    run.sink.put([event("eval", step=step, loss=run.state["eval_loss"])])
    if run.ranks.rank == 0:
        print(f"step {step}/{run.config.steps}  held-out loss {run.state['eval_loss']:.4f}", flush=True)


def boundary(run: Run, told: ShutdownSignal) -> None:
    """Between two pieces of work the ranks do what they agreed on: go on, save, or save and leave."""
    told.raise_if_peer_failed()
    saver = run.saver
    wish = StepVote(told.preempted, save=saver is not None and saver.due(), leave=bool(saver and saver.superseded))
    agreed = run.agreement.vote(wish, run.recorder.lately)
    if agreed.leave:
        raise (saver and saver.superseded) or SupersededError("another start of this run has taken it over")
    if agreed.stop:
        run.heartbeat.expect(inf)
        give_way(run, told)
    if saver:
        saver.after_step(run.state["step"], run.recorder.usual, run.seconds, run.state["interruptions"])
        if agreed.save and run.state["step"] < run.config.steps:  # the last one comes by itself
            block(run)
            expect(run, RARE_SECONDS)
            compare_now(run)
            with run.profiler.range("checkpoint"):
                saver.begin(run.state["step"], to_save(run))
    expect(run)


def expect(run: Run, least: float = STEP_SECONDS) -> None:
    """Give the node the deadline of this step or evaluation batch; it restarts a run that misses it.

    There is no deadline until the first step was timed, nor while the profiler records.
    """
    asked, lately = run.config.hang_after, run.recorder.lately
    if asked == "off" or not lately or run.profiler.records:
        seconds = inf
    elif asked == "auto":
        waits = run.ranks.world > 1 and run.source.slow  # for a peer that waits for its data
        compiles = run.ranks.nodes > 1 and run.is_compiled  # a peer on another node, whose stacks aren't seen here
        peers = RARE_SECONDS if compiles else DATA_SECONDS if waits else 0.0
        seconds = max(least, peers, HANG_STEPS * lately)
    else:
        seconds = max(asked, RARE_SECONDS) if least == RARE_SECONDS else asked
    run.heartbeat.expect(seconds)


def conclude(run: Run, told: ShutdownSignal) -> None:
    """All ranks must have come to the same parameters; then they write the last checkpoint, and rank 0 the summary."""
    told.saving = True  # a preemption that comes now is too late to change anything
    run.heartbeat.expect(inf)
    run.agreement.close()
    compare_now(run)
    broadcast_buffers(run.ranks, run.model)  # the reported held-out loss is that of the model that is saved
    digest, step, seconds = parameters_sha256(run.model), run.state["step"], run.seconds
    if wrong := disagreement(gather(run.ranks, digest)):
        raise DisagreementError(wrong)
    if run.saver and not (run.resumed and run.resumed.step == step and "parameters_sha256" in run.resumed.about):
        run.saver.save(step, to_save(run, parameters_sha256=digest))
        run.saver.prune()
    if run.ranks.rank == 0:
        end = (
            run.facts
            | run.recorder.totals(step - run.guard.skipped)
            | run.monitor.facts()
            | {"parameters_sha256": digest, "seconds": seconds}
        )
        end |= {"step": step, "eval_loss": run.state["eval_loss"], "skipped_steps": run.guard.skipped}
        run.sink.put([event("end", **end)])
        print(console.summary(end, run.source.unit, run.storage.url if run.storage else None), flush=True)
