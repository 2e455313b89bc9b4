"""What an analysis means in plain words, and which setting to change first. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch_train.common.text import plural
from launch_train.profiling.bottleneck import Analysis, Cause

WORTH = 0.05
"""A share of the time from which on a cause gets a sentence."""

AVOIDABLE = 0.15
"""A share from which on something other than computing is to be changed first, though most of the time is computing."""

WIDTH = 60


class Setup(NamedTuple):
    """What the run was set to when it was recorded."""

    gpu: bool = False
    world: int = 1
    nodes: int = 1
    precision: str = "fp32"
    compiled: bool = False
    cuda_graphs: bool = False
    workers: int | None = None
    """Processes that prepare batches, on each rank; None: it isn't known."""
    checkpointing: str = "none"
    parallel: str = "ddp"
    log_every: int = 10
    accumulates: bool = False
    """Whether a step has several micro-batches."""
    bf16: bool = False
    """Whether the GPU has bf16 or fp16 tensor cores, and the run uses neither."""


class Verdict(NamedTuple):
    """`change` is the setting of run.config to change first; empty if it is none of them."""

    bound: Cause
    shares: Mapping[Cause, float]
    sentences: tuple[str, ...]
    change: str
    advice: str
    steps: int
    seconds: float
    """Of one step, as it was recorded."""
    which: str = ""
    """The steps' numbers, 8-10, where they are known."""


class Advice(NamedTuple):
    """What to do about a cause: a setting of run.config (or none), and a sentence's second half."""

    setting: str
    words: str


def verdict(analysis: Analysis, setup: Setup) -> Verdict:
    """What bounds the run, in words."""
    shares = analysis.shares
    ordered = sorted((cause for cause in shares if shares[cause] >= WORTH), key=lambda cause: -shares[cause])
    first = _first(ordered, shares)
    advice = ADVICE[first](analysis, setup)
    sentences = tuple(f"{_percent(shares[cause])} {_words(cause, analysis)}." for cause in ordered)
    return Verdict(analysis.bound, shares, sentences, advice.setting, advice.words, analysis.steps, analysis.seconds)


def _first(ordered: list[Cause], shares: Mapping[Cause, float]) -> Cause:
    """Of what cause something is to be changed: the largest; but computing is what a run is for."""
    avoidable = [cause for cause in ordered if cause not in ("compute", "other") and shares[cause] >= AVOIDABLE]
    if not ordered or ordered[0] in ("compute", "other"):
        return avoidable[0] if avoidable else (ordered[0] if ordered else "other")
    return ordered[0]


def _words(cause: Cause, analysis: Analysis) -> str:
    words = WORDS[cause] if analysis.gpu else ON_CPU.get(cause, WORDS[cause])
    if cause == "input" and analysis.copying > 0.5:
        words = "copying batches to the GPU, while nothing is computed"
    if cause == "launch_overhead" and analysis.gpu:
        words += f" ({analysis.launches:,} kernels a step)"
    return words


WORDS: Mapping[Cause, str] = {
    "input": "waiting for the next batch",
    "compute": "computing: matrices, convolutions, attention",
    "communication": "talking to the other ranks or waiting for them, while nothing is computed",
    "memory": "moving memory: elementwise operators, norms, copies",
    "launch_overhead": "launching: the GPU waits for Python to call the next small operator",
    "host_sync": "after waits for the GPU: the host reads a value, and the GPU runs dry meanwhile",
    "optimizer": "in the optimizer's update",
    "allocation": "taking memory from the driver and giving it back",
    "other": "outside of the steps: logging, reports, the loop itself",
}


ON_CPU: Mapping[Cause, str] = {
    "launch_overhead": "calling operators so small that calling them is the work",
    "host_sync": "reading values one by one (.item())",
}


# --- What to change -------------------------------------------------------------------------------------------------


def _input(analysis: Analysis, setup: Setup) -> Advice:
    if analysis.copying > 0.5:
        return Advice(
            "loader.workers", "batches are copied too late: give loader.workers 1 or more, with pinned memory"
        )
    if setup.workers:
        return Advice(
            "loader.workers",
            f"loader.workers: {2 * setup.workers} instead of {setup.workers}; "
            "if the CPUs are busy, prepare the data beforehand",
        )
    if not analysis.gpu:  # training has the cores itself
        words = "loader.workers: 1 or more, if cores are free; else prepare the data beforehand"
        return Advice("loader.workers", words)
    return Advice("loader.workers", "loader.workers: 4, so that batches are made while the last one is learned from")


def _compute(analysis: Analysis, setup: Setup) -> Advice:
    if not analysis.gpu:
        return Advice("", "it computes all the time: a machine with a GPU, or more processes, is what makes it faster")
    if setup.bf16:
        return Advice("precision", "precision: auto, so that the GPU's tensor cores compute in 16 bits")
    if not setup.compiled:
        return Advice("compile", "compile: true")
    return Advice("", "it computes all the time: a faster GPU, or more of them, is what makes it faster")


def _communication(analysis: Analysis, setup: Setup) -> Advice:
    if setup.parallel == "fsdp":
        return Advice("parallel", "parallel: ddp if the model fits one GPU; else GPUs that NVLink joins")
    if setup.nodes > 1:
        instead = "fewer, larger machines"
    else:
        instead = "a machine whose GPUs NVLink joins" if analysis.gpu else "fewer processes"
    words = f"a larger batch_size, for the same exchange; or {instead}"
    return Advice("batch_size", f"{words}. If one rank is slower than the others, all wait for it here")


def _memory(analysis: Analysis, setup: Setup) -> Advice:
    if not analysis.gpu:  # there, compiling takes longer than it saves in most runs: see _launch_overhead
        return _calculated_once(setup) or Advice("", "a machine with a GPU, whose memory is many times as fast")
    if not setup.compiled:
        return Advice("compile", "compile: true, which joins elementwise operators into one pass over the memory")
    if setup.bf16:
        return Advice("precision", "precision: auto: 16 bits are half as much to move")
    return _calculated_once(setup) or Advice(
        "", "operators of the model's own that move less memory: fused ones, or fewer"
    )


def _calculated_once(setup: Setup) -> Advice | None:
    """Where activations are calculated twice."""
    if setup.checkpointing == "none":
        return None
    return Advice(
        "activation_checkpointing",
        "activation_checkpointing: none, if the memory allows it: nothing is then calculated twice",
    )


def _launch_overhead(analysis: Analysis, setup: Setup) -> Advice:
    if setup.accumulates:
        return Advice("micro_batch_size", "a larger micro_batch_size: fewer and larger operators")
    # Of the quickstart's GPT on a CPU, compiling took two minutes and saved a fifth of a step of 0.1 s.
    if analysis.gpu and not setup.compiled:
        return Advice("compile", "compile: true, which makes few large operators of many small ones")
    if analysis.gpu and not setup.cuda_graphs:
        return Advice("cuda_graphs", "cuda_graphs: true, which launches a whole pass at once")
    return Advice("batch_size", "a larger batch_size: the same number of larger operators")


def _host_sync(analysis: Analysis, setup: Setup) -> Advice:
    if analysis.sync_outside > 0.5:
        return Advice(
            "log_every",
            f"log_every: {max(10, 10 * setup.log_every)} instead of {setup.log_every}: the metrics are read that often",
        )
    return Advice(
        "",
        "the model or the loss reads a value in each step (.item(), .cpu(), print, `if tensor`): keep it on the device",
    )


def _optimizer(analysis: Analysis, setup: Setup) -> Advice:
    return Advice("batch_size", "a larger batch_size: fewer updates for as much data")


def _allocation(analysis: Analysis, setup: Setup) -> Advice:
    return Advice(
        "micro_batch_size",
        "a smaller micro_batch_size: the GPU's memory is nearly full, and PyTorch gives some back to get other pieces",
    )


def _other(analysis: Analysis, setup: Setup) -> Advice:
    return Advice("log_every", "a larger log_every, and evaluations and checkpoints less often")


ADVICE: Mapping[Cause, Callable[[Analysis, Setup], Advice]] = {
    "input": _input,
    "compute": _compute,
    "communication": _communication,
    "memory": _memory,
    "launch_overhead": _launch_overhead,
    "host_sync": _host_sync,
    "optimizer": _optimizer,
    "allocation": _allocation,
    "other": _other,
}


# --- As it is shown -------------------------------------------------------------------------------------------------


def shown(found: Verdict) -> str:
    """Lines of at most WIDTH columns."""
    steps = plural(found.steps, "step")
    which = f"{steps.partition(' ')[2]} {found.which}" if found.which else steps
    head = f"profile of {which}: bound by {found.bound.replace('_', ' ')}"
    lines = [line for sentence in found.sentences for line in _wrapped(sentence, " " * (5 - sentence.index(" ")))]
    return "\n".join([head, *lines, *_wrapped(f"First: {found.advice}.", "  ")])


def _wrapped(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=" " * 6)


def as_data(found: Verdict) -> dict[str, Any]:
    """Plain data for the metrics and verdict.json, rounded for readers."""
    return {
        "bound": found.bound,
        "shares": {cause: round(share, 4) for cause, share in found.shares.items()},
        "sentences": list(found.sentences),
        "change": found.change,
        "advice": found.advice,
        "steps": found.steps,
        "step_s": round(found.seconds, 6),
    }


def _percent(share: float) -> str:
    return f"{share:.0%}"
