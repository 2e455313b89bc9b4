"""Turn an analysis into sentences and the setting to change first. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch_train.common.text import plural
from launch_train.profiling.bottleneck import Analysis, Cause, Kernel

MIN_SHARE = 0.05
"""Smallest share of the time for which a cause gets a sentence."""

MIN_AVOIDABLE_SHARE = 0.15
"""Smallest share at which another cause is addressed first even if most of the time is computing."""

WIDTH = 60


class Setup(NamedTuple):
    """The run's settings when it was recorded."""

    gpu: bool = False
    world: int = 1
    nodes: int = 1
    precision: str = "fp32"
    compiled: bool = False
    cuda_graphs: bool = False
    workers: int | None = None
    """Worker processes that prepare batches, per rank; None: unknown."""
    checkpointing: str = "none"
    parallel: str = "ddp"
    log_every: int = 10
    accumulates: bool = False
    """True if a step has several micro-batches."""
    bf16: bool = False
    """True if the GPU has bf16 or fp16 tensor cores that the run doesn't use."""


class Verdict(NamedTuple):
    """What limits the speed. `change` is the setting of run.config to change first; empty if there is none."""

    bound: Cause
    shares: Mapping[Cause, float]
    sentences: tuple[str, ...]
    change: str
    advice: str
    steps: int
    seconds: float
    """Duration of a recorded step."""
    which: str = ""
    """The numbers of the steps (8-10), if known."""
    kernels: tuple[Kernel, ...] = ()


class Advice(NamedTuple):
    """Advice text, and the setting of run.config to change (empty if there is none)."""

    setting: str
    words: str


def verdict(analysis: Analysis, setup: Setup) -> Verdict:
    """Return what limits the run's speed, with a sentence per cause and the first thing to change."""
    shares = analysis.shares
    ordered = sorted((cause for cause in shares if shares[cause] >= MIN_SHARE), key=lambda cause: -shares[cause])
    first = _first(ordered, shares)
    advice = ADVICE[first](analysis, setup)
    sentences = tuple(f"{_percent(shares[cause])} {_words(cause, analysis)}." for cause in ordered)
    return Verdict(
        analysis.bound,
        shares,
        sentences,
        advice.setting,
        advice.words,
        analysis.steps,
        analysis.seconds,
        kernels=analysis.kernels,
    )


def _first(ordered: list[Cause], shares: Mapping[Cause, float]) -> Cause:
    """Return the cause to address first: the largest, but computing only if no other is large."""
    avoidable = [
        cause for cause in ordered if cause not in ("compute", "other") and shares[cause] >= MIN_AVOIDABLE_SHARE
    ]
    if not ordered or ordered[0] in ("compute", "other"):
        return avoidable[0] if avoidable else (ordered[0] if ordered else "other")
    return ordered[0]


def _words(cause: Cause, analysis: Analysis) -> str:
    words = WORDS[cause] if analysis.gpu else ON_CPU.get(cause, WORDS[cause])
    if cause == "input" and analysis.copying > 0.5:
        words = "copying batches to the GPU, not overlapped with computing"
    if cause == "launch_overhead" and analysis.gpu:
        words += f" ({analysis.launches:,} kernels per step)"
    return words


WORDS: Mapping[Cause, str] = {
    "input": "waiting for the next batch",
    "compute": "computing: matrix products, convolutions, attention",
    "communication": "communicating with other ranks or waiting for them, not overlapped with computing",
    "memory": "moving memory: elementwise operators, norms, copies",
    "launch_overhead": "launch overhead: the GPU waits for Python to call the next small operator",
    "host_sync": "idle after host syncs: the host waited to read a value, and the GPU had no more work",
    "optimizer": "in the optimizer's update",
    "allocation": "allocating and freeing memory in the driver",
    "other": "outside of the steps: logging, reports, the loop itself",
}


ON_CPU: Mapping[Cause, str] = {
    "launch_overhead": "call overhead of very small operators",
    "host_sync": "reading values one by one (.item())",
}


# --- What to change -------------------------------------------------------------------------------------------------


def _input(analysis: Analysis, setup: Setup) -> Advice:
    if analysis.copying > 0.5:
        return Advice(
            "loader.workers", "batches are copied too late: set loader.workers to 1 or more, which uses pinned memory"
        )
    if setup.workers:
        return Advice(
            "loader.workers",
            f"loader.workers: {2 * setup.workers} instead of {setup.workers}; "
            "if the CPUs are busy, preprocess the data before training",
        )
    if not analysis.gpu:  # training uses the cores itself
        words = "loader.workers: 1 or more, if cores are free; else preprocess the data before training"
        return Advice("loader.workers", words)
    return Advice("loader.workers", "loader.workers: 4, to prepare batches while the GPU trains on the last one")


def _compute(analysis: Analysis, setup: Setup) -> Advice:
    if not analysis.gpu:
        return Advice("", "it computes all the time; a machine with a GPU or more processes would be faster")
    if setup.bf16:
        return Advice("precision", "precision: auto, to use the GPU's tensor cores in 16 bits")
    if not setup.compiled:
        return Advice("compile", "compile: true")
    return Advice("", "it computes all the time; a faster GPU or more GPUs would be faster")


def _communication(analysis: Analysis, setup: Setup) -> Advice:
    if setup.parallel == "fsdp":
        return Advice("parallel", "parallel: ddp if the model fits one GPU; else GPUs connected by NVLink")
    if setup.nodes > 1:
        instead = "fewer, larger machines"
    else:
        instead = "a machine with GPUs connected by NVLink" if analysis.gpu else "fewer processes"
    words = f"a larger batch_size, for the same communication; or {instead}"
    return Advice("batch_size", f"{words}. If one rank is slower than the others, all ranks wait for it here")


def _memory(analysis: Analysis, setup: Setup) -> Advice:
    if not analysis.gpu:  # on a CPU, compiling costs more than most runs gain: see _launch_overhead
        return _without_recomputation(setup) or Advice("", "a machine with a GPU, whose memory is many times faster")
    if not setup.compiled:
        return Advice("compile", "compile: true, which fuses elementwise operators into one pass over memory")
    if setup.bf16:
        return Advice("precision", "precision: auto: 16-bit numbers move half as many bytes")
    return _without_recomputation(setup) or Advice("", "fewer or fused operators in the model, to move less memory")


def _without_recomputation(setup: Setup) -> Advice | None:
    """Return the advice to turn activation checkpointing off, if it is on."""
    if setup.checkpointing == "none":
        return None
    return Advice(
        "activation_checkpointing",
        "activation_checkpointing: none, if memory allows: nothing is then computed twice",
    )


def _launch_overhead(analysis: Analysis, setup: Setup) -> Advice:
    if setup.accumulates:
        return Advice("micro_batch_size", "a larger micro_batch_size: fewer and larger operators")
    # Measured: compiling the quickstart's GPT on a CPU took two minutes and saved a fifth of a 0.1 s step.
    if analysis.gpu and not setup.compiled:
        return Advice("compile", "compile: true, which fuses small operators into few large ones")
    if analysis.gpu and not setup.cuda_graphs:
        return Advice("cuda_graphs", "cuda_graphs: true, which launches a whole pass at once")
    return Advice("batch_size", "a larger batch_size: the same number of larger operators")


def _host_sync(analysis: Analysis, setup: Setup) -> Advice:
    if analysis.sync_outside > 0.5:
        return Advice(
            "log_every",
            f"log_every: {max(10, 10 * setup.log_every)} instead of {setup.log_every}: each time metrics are read, the "
            "host waits for the GPU",
        )
    return Advice(
        "",
        "the model or the loss reads a value in each step (.item(), .cpu(), print, `if tensor`): keep it on the GPU",
    )


def _optimizer(analysis: Analysis, setup: Setup) -> Advice:
    return Advice("batch_size", "a larger batch_size: fewer updates for the same data")


def _allocation(analysis: Analysis, setup: Setup) -> Advice:
    return Advice(
        "micro_batch_size",
        "a smaller micro_batch_size: the GPU's memory is nearly full, so PyTorch has to free and reallocate blocks",
    )


def _other(analysis: Analysis, setup: Setup) -> Advice:
    return Advice("log_every", "a larger log_every, and less frequent evaluations and checkpoints")


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


# --- Output ---------------------------------------------------------------------------------------------------------


def shown(found: Verdict) -> str:
    """Return the verdict as lines of at most WIDTH columns."""
    steps = plural(found.steps, "step")
    which = f"{steps.partition(' ')[2]} {found.which}" if found.which else steps
    head = f"profile of {which}: bound by {found.bound.replace('_', ' ')}"
    lines = [line for sentence in found.sentences for line in _wrapped(sentence, " " * (5 - sentence.index(" ")))]
    return "\n".join([head, *lines, *_wrapped(f"First: {found.advice}.", "  ")])


def _wrapped(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=" " * 6)


def as_data(found: Verdict) -> dict[str, Any]:
    """Return the verdict as plain data for the metrics and verdict.json, with rounded numbers."""
    return {
        "bound": found.bound,
        "shares": {cause: round(share, 4) for cause, share in found.shares.items()},
        "sentences": list(found.sentences),
        "change": found.change,
        "advice": found.advice,
        "steps": found.steps,
        "step_s": round(found.seconds, 6),
        "kernels": [
            {"name": one.name, "ms": round(one.seconds * 1000, 4), "calls": round(one.calls, 2)}
            for one in found.kernels
        ],
    }


def _percent(share: float) -> str:
    return f"{share:.0%}"
