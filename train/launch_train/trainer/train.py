"""The built-in training loop, from top to bottom.

torchrun --standalone --nproc-per-node 2 -m launch_train
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, reduce
from math import inf, isfinite

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from launch_train.checkpointing.async_saver import Saver
from launch_train.common import console, contract, faults
from launch_train.common.config import Config
from launch_train.common.errors import DisagreementError, SupersededError, TrainError
from launch_train.common.shutdown_signal import ShutdownSignal, catch_sigterm
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
    mean,
    raise_timeout,
)
from launch_train.models.resnet import ResNetModel
from launch_train.performance import attention, grad_guard, loss_normalization, micro_batch, optimizer, prepare_model
from launch_train.performance.precision import autocast
from launch_train.trainer.build import Run, seed, setup
from launch_train.trainer.metrics_buffer import StepRecord
from launch_train.trainer.replica_check import find_disagreement, parameters_sha256
from launch_train.trainer.reporting import compare_replicas, event, report_if_due, write_rows
from launch_train.trainer.resume import read_state, resume_or_start, snapshot
from launch_train.trainer.shutdown import exit_if_stuck, save_and_exit, write_last_rows
from launch_train.trainer.warmup import without_side_effects

WARM_UP_STEPS = 2

HANG_STEPS = 10
"""A step counts as hung when it takes this many times as long as recent steps."""
MIN_STEP_SECONDS, MIN_DATA_SECONDS, MIN_RARE_SECONDS = 60.0, 600.0, 1800.0
"""Shortest deadlines: for a step, for one that waits for its data, and for rare work (compilation, a checkpoint)."""

DDP_UNFINISHED = "Expected to have finished reduction"
"""Part of DDP's error in a forward pass if the previous backward pass failed after its all-reduce had begun."""


def train(config: Config, ranks: Ranks, env: Mapping[str, str]) -> None:
    """Train as `config` says, from the newest checkpoint in the run folder if there is one.

    Raises, on all ranks: UsageError, DisagreementError, SupersededError, PreemptedError (a checkpoint is saved). On
    rank 0, which alone writes the metrics: OutputError. On a rank that runs out of memory: OutOfMemoryError. SystemExit
    (143) after a SIGTERM caused by another rank's failure, or if there was no time to save.
    """
    device = ranks.device.type
    kernel = attention.choose_kernel(config, device)
    with micro_batch.explain_out_of_memory(ranks), attention.use_kernel(kernel, device):
        run = setup(config, ranks, env)
        if env.get(contract.WATCH) and config.hang_after != "off":
            hang_after = 0.0 if config.hang_after == "auto" else config.hang_after
            raise_timeout(timedelta(seconds=WATCHED_SECONDS + hang_after))
        warm_up(run)
        run = resume_or_start(run, env)
        with catch_sigterm(env, partial(exit_if_stuck, run, Peers(ranks))) as shutdown:
            train_loop(run, shutdown)


def train_loop(run: Run, shutdown: ShutdownSignal) -> None:
    try:
        run.sink.put([event("start", **run.facts)])
        if run.resumed:
            run.sink.put([event("resumed", step=run.resumed.step, path=run.resumed.folder)])
            if run.ranks.rank == 0 and run.is_done:
                print("training is already complete; nothing to do", flush=True)
        run.profiler.start()
        while has_work_left(run):
            if run.state["eval_due"]:
                with run.profiler.range("evaluation"):
                    evaluate(run, shutdown)
                    write_samples(run, shutdown)
                save_after_evaluation(run)
            else:
                train_step(run)
                report_if_due(run)
            save_or_stop(run, shutdown)
        finish(run, shutdown)
    except BaseException as error:
        if run.saver:
            run.saver.cancel()
        write_last_rows(run)
        if shutdown.signum and not isinstance(error, TrainError):  # a consequence of another rank's exit
            raise SystemExit(128 + shutdown.signum) from error
        raise
    finally:
        run.heartbeat.expect(inf)
        run.batch_loader.close()
        run.profiler.close()
        run.monitor.close()
    run.sink.close()
    barrier(run.ranks)  # rank 0 may still be writing the last rows


def warm_up(run: Run) -> None:
    """Run two passes that change nothing.

    After its first backward pass (second for a static graph) DDP moves the gradients to other buckets, which changes
    the order of additions. With these passes done, a new and a resumed run add in the same order.
    """
    if run.ranks.world == 1:
        return
    batch = run.batch_loader.once(1)
    with without_side_effects(run.model):
        for _ in range(WARM_UP_STEPS):
            warm_up_pass(run, batch)
            run.optimizer.zero_grad(set_to_none=True)
    seed(run.config, run.ranks)


def warm_up_pass(run: Run, batch: Batch) -> None:
    """Run one pass, without a retry if it runs out of memory: in a static graph's first pass DDP counts gradients."""
    size = run.micro_batches.size
    try:
        with micro_batch.unify_out_of_memory():
            forward_backward(run, batch)
    except torch.OutOfMemoryError as error:
        if run.micro_batches.halve():
            micro_batch.lower_limit(run.storage, run.micro_batches.size)
        raise micro_batch.out_of_memory_error(run.micro_batches, size, run.ranks) from error


def has_work_left(run: Run) -> bool:
    return not run.is_done


def train_step(run: Run) -> None:
    """Train on one global batch: micro-batches forward and backward, one update. The host never waits for the GPU."""
    step, eval_every = run.state["step"] + 1, run.config.eval.every
    run.stopwatch.start()
    lr = optimizer.learning_rate(step, run.config.steps, run.config.optimizer)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    set_deadline(run, MIN_DATA_SECONDS)
    with run.profiler.range("data"):
        batch = run.batch_loader.train(run.state["samples"] // run.config.batch_size + 1)
    set_deadline(run)
    loss = forward_backward_with_retry(run, batch)
    with run.profiler.range("optimizer"):
        loss = loss_normalization.normalize_gradients(run.ranks, run.parameters, loss)
        grad_norm = optimizer_step(run)
    run.stopwatch.stop()
    timed = not run.profiler.records
    run.recorder.add(StepRecord(step, lr, loss, grad_norm, run.batch_loader.waited(), timed, run.micro_batches.size))
    run.profiler.stepped(step)
    run.state["step"] = step
    faults.record_step(step)
    run.state["samples"] += run.config.batch_size
    run.state["eval_due"] = bool(eval_every) and (step % eval_every == 0 or step == run.config.steps)


def forward_backward_with_retry(run: Run, batch: Batch) -> Tensor:
    """Call `forward_backward`; if memory runs out, retry with smaller micro-batches.

    Raises OutOfMemoryError if the step can't be retried on this rank.
    """
    out_of_memory, size = "", run.micro_batches.size
    while True:
        previous, size = size, run.micro_batches.size
        try:
            with micro_batch.unify_out_of_memory():
                return forward_backward(run, batch)
        except torch.OutOfMemoryError as error:
            out_of_memory = str(error).partition("\n")[0]
        except RuntimeError as error:
            if not out_of_memory or DDP_UNFINISHED not in str(error):
                if missing_gradient := prepare_model.explain_missing_gradient(error, run.model):
                    raise missing_gradient from error
                raise
            raise micro_batch.out_of_memory_error(run.micro_batches, previous, run.ranks) from error
        # Outside the handler: its traceback holds the tensors of the failed pass.
        run.optimizer.zero_grad(set_to_none=True)
        micro_batch.free_memory(run.ranks.device)
        shrink_micro_batch(run, size, out_of_memory)


def shrink_micro_batch(run: Run, before: int, reason: str) -> None:
    """Halve the micro-batch, here and as the limit of later starts. Raises OutOfMemoryError if this step can't be
    retried."""
    set_deadline(run, MIN_RARE_SECONDS)  # the new size may have to be compiled
    can_retry = micro_batch.halve_for_retry(run.micro_batches, run.model, run.ranks)
    step, size = run.state["step"] + 1, run.micro_batches.size
    if size < before:
        micro_batch.lower_limit(run.storage, size)
        print(f"step {step}: out of memory with micro-batch {before}; retrying with {size}: {reason[:100]}", flush=True)
        if run.is_compiled:  # the new size gets static kernels, as in a start that begins with it
            torch._dynamo.config.automatic_dynamic_shapes = False
    if not can_retry:
        raise micro_batch.out_of_memory_error(run.micro_batches, before, run.ranks)


def forward_backward(run: Run, batch: Batch) -> Tensor:
    """Accumulate the gradients of this rank's share of the batch; the last backward pass averages them over the ranks.

    Returns the loss in the form of `loss_normalization.loss_of`.
    """
    parts = split(batch, run.micro_batches.size)
    losses: list[Tensor] = []
    for number, part in enumerate(parts, start=1):
        with nullcontext() if number == len(parts) else run.no_sync():
            with run.profiler.range("forward"), autocast(run.policy, run.ranks.device):
                loss = loss_normalization.loss_of(run.forward, part, run.countable_targets)
                loss = loss / len(parts) if len(parts) > 1 else loss
            if number == len(parts):
                run.stopwatch.lap()  # with DDP, what follows waits for the other ranks
            with run.profiler.range("backward"):
                run.scaler.scale(loss_normalization.backward_loss(loss)).backward()
        losses.append(loss.detach().clone())  # a CUDA graph writes the next loss to the same memory
    return reduce(torch.add, losses)


def optimizer_step(run: Run) -> Tensor:
    """Clip the gradients, update the parameters and clear the gradients. Returns the norm before clipping."""
    run.scaler.unscale_(run.optimizer)
    norm = full_tensor(clip_grad_norm_(run.parameters, run.config.optimizer.grad_clip or float("inf")))
    if not run.scaler.is_enabled():  # an enabled GradScaler skips non-finite steps itself
        grad_guard.skip_unless_finite(run.optimizer, norm)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    return norm


@torch.no_grad()
def evaluate(run: Run, shutdown: ShutdownSignal) -> None:
    """Compute the mean loss on the held-out batches, the same ones each time, split among the ranks; of a classifier
    also its accuracy."""
    set_deadline(run, MIN_RARE_SECONDS)  # the first batch may have to be compiled
    broadcast_buffers(run.ranks, run.model)
    batches = run.config.eval.batches
    total = torch.zeros((2,) if run.countable_targets else (), device=run.ranks.device)
    classifier = run.model if isinstance(run.model, ResNetModel) else None
    correct = torch.zeros(3, device=run.ranks.device)
    run.model.eval()
    for index in range(batches):
        if index:
            set_deadline(run, MIN_DATA_SECONDS)
        batch = run.batch_loader.held_out(index, batches)
        if index:
            set_deadline(run)
        parts = split(batch, run.micro_batches.size)
        for part in parts:
            with autocast(run.policy, run.ranks.device):
                total += loss_normalization.loss_of(run.eval_forward, part, run.countable_targets) / len(parts)
            if classifier:
                correct += classifier.correct
        save_or_stop(run, shutdown)  # a preemption interrupts an evaluation; the next start repeats it
        if run.saver:
            run.saver.note_evaluation()
    run.model.train()
    step, run.state["eval_due"] = run.state["step"], False
    run.state["eval_step"] = step
    run.state["eval_loss"] = loss_normalization.global_mean(run.ranks, total / batches).item()
    accuracy: dict[str, float] = {}
    if classifier:  # the shares of images whose label is the first guess, and among the first five
        first, five, images = mean(run.ranks, correct).tolist()
        accuracy = {"accuracy": first / images, "accuracy_top5": five / images}
    run.facts.update({f"eval_{name}": share for name, share in accuracy.items()})
    run.sink.put([event("eval", step=step, loss=run.state["eval_loss"], **accuracy)])
    if run.ranks.rank == 0:
        right = f"  accuracy {accuracy['accuracy']:.1%}" if accuracy else ""
        print(f"step {step}/{run.config.steps}  held-out loss {run.state['eval_loss']:.4f}{right}", flush=True)


def write_samples(run: Run, shutdown: ShutdownSignal) -> None:
    """Write the evaluation's samples on rank 0, if the config asks for any. The other ranks wait here, so that no step
    counts the time."""
    if not run.config.eval.samples:
        return
    set_deadline(run, MIN_RARE_SECONDS)
    if run.ranks.rank == 0:
        samples = run.sampler.take(run.model, run.micro_batches.size, lambda: bool(shutdown.signum))
        if samples:
            run.sink.put([event("samples", step=run.state["step"], **samples)])
    barrier(run.ranks)


def save_or_stop(run: Run, shutdown: ShutdownSignal) -> None:
    """Save a checkpoint, or save and exit, if the ranks have agreed to. Called between steps and evaluation batches."""
    shutdown.raise_if_peer_failed()
    saver = run.saver
    if saver and run.state["step"]:
        saver.estimate(partial(read_state, run))
    vote = StepVote(shutdown.preempted, save=saver is not None and saver.due(), leave=bool(saver and saver.superseded))
    agreed = run.agreement.vote(vote, run.recorder.recent_seconds)
    if agreed.leave:
        raise (saver and saver.superseded) or SupersededError("another start of this run has taken over")
    if agreed.stop:
        run.heartbeat.expect(inf)
        save_and_exit(run, shutdown)
    if saver:
        saver.after_step(run.state["step"], run.recorder.median_seconds, run.seconds, run.state["interruptions"])
        if agreed.save and run.config.checkpoint.keep_best and run.state["eval_due"]:
            saver.postponed = True  # a checkpoint without its loss could not be one of the best
        elif agreed.save:
            begin_save(run, saver)
    set_deadline(run)


def begin_save(run: Run, saver: Saver) -> None:
    """Begin a checkpoint, unless `finish` is about to save the last step."""
    saver.postponed = False
    if run.state["step"] >= run.config.steps:
        return
    write_rows(run)
    set_deadline(run, MIN_RARE_SECONDS)
    if run.config.checkpoint.keep_best:
        saver.finish()  # a running save would be cancelled, and it may be one of the best
        barrier(run.ranks)
    compare_replicas(run)
    with run.profiler.range("checkpoint"):
        saver.begin(run.state["step"], snapshot(run))


def save_after_evaluation(run: Run) -> None:
    """Save a checkpoint if its loss is one of the lowest (`checkpoint.keep.best`), or if a save has waited for it.

    All ranks know the loss, so they decide alike without a vote.
    """
    saver, keep = run.saver, run.config.checkpoint.keep_best
    if saver is None or not keep or run.state["eval_due"]:
        return
    loss = run.state["eval_loss"]
    is_best = isfinite(loss) and (len(saver.best) < keep or loss < saver.best[-1])
    if is_best:
        saver.best = sorted([*saver.best, loss])[:keep]
    if is_best or saver.postponed:
        begin_save(run, saver)
        set_deadline(run)


def set_deadline(run: Run, minimum: float = MIN_STEP_SECONDS) -> None:
    """Tell the node how many seconds the current work may take; it restarts a run that misses the deadline.

    There is no deadline until the first step was timed, nor while the profiler records.
    """
    hang_after, recent = run.config.hang_after, run.recorder.recent_seconds
    if hang_after == "off" or not recent or run.profiler.records:
        seconds = inf
    elif hang_after == "auto":
        waits_for_data = run.ranks.world > 1 and run.source.slow  # a peer may wait for its data
        compiles = run.ranks.nodes > 1 and run.is_compiled  # a peer may compile on a node whose stacks aren't seen here
        peers = MIN_RARE_SECONDS if compiles else MIN_DATA_SECONDS if waits_for_data else 0.0
        seconds = max(minimum, peers, HANG_STEPS * recent)
    else:
        seconds = max(hang_after, MIN_RARE_SECONDS) if minimum == MIN_RARE_SECONDS else hang_after
    run.heartbeat.expect(seconds)


def finish(run: Run, shutdown: ShutdownSignal) -> None:
    """Check that all ranks have the same parameters, write the last checkpoint and print the summary."""
    shutdown.saving = True  # from here on a preemption changes nothing
    run.heartbeat.expect(inf)
    run.agreement.close()
    compare_replicas(run)
    broadcast_buffers(run.ranks, run.model)  # the saved model must be the one that was evaluated
    digest, step, seconds = parameters_sha256(run.model, run.ranks), run.state["step"], run.seconds
    if problem := find_disagreement(gather(run.ranks, digest)):
        raise DisagreementError(problem)
    if run.saver and not (run.resumed and run.resumed.step == step and "parameters_sha256" in run.resumed.about):
        run.saver.finish_best()
        run.saver.save(step, snapshot(run, parameters_sha256=digest))
        run.saver.prune()
    if run.ranks.rank == 0:
        end = (
            run.facts
            | run.recorder.summary(step - run.guard.skipped)
            | run.monitor.facts()
            | {"parameters_sha256": digest, "seconds": seconds}
        )
        end |= {"step": step, "eval_loss": run.state["eval_loss"], "skipped_steps": run.guard.skipped}
        run.sink.put([event("end", **end)])
        print(console.end_table(end, run.source.unit, run.storage.url if run.storage else None), flush=True)
