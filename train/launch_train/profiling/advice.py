"""Turn an analysis into sentences and the setting to change first. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
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


def explain_analysis(analysis: Analysis, setup: Setup) -> Verdict:
    """Return what limits the run's speed, with a sentence per cause and the first thing to change.

    That is the largest cause, but computing only if no other cause is large.
    """
    shares = analysis.shares
    causes = sorted((cause for cause in shares if shares[cause] >= MIN_SHARE), key=lambda cause: -shares[cause])
    first: Cause = causes[0] if causes else "other"
    if first in ("compute", "other"):
        avoidable = (cause for cause in causes if cause not in ("compute", "other"))
        first = next((cause for cause in avoidable if shares[cause] >= MIN_AVOIDABLE_SHARE), first)
    setting, advice = _advice(first, analysis, setup)
    sentences = tuple(f"{shares[cause]:.0%} {_words(cause, analysis)}." for cause in causes)
    return Verdict(
        analysis.bound,
        shares,
        sentences,
        setting,
        advice,
        analysis.steps,
        analysis.seconds,
        kernels=analysis.kernels,
    )


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


def _advice(cause: Cause, analysis: Analysis, setup: Setup) -> tuple[str, str]:  # noqa: PLR0911,PLR0912 - a table
    """Return the setting of run.config to change first for a cause (empty if there is none), and what to do."""
    recompute = "activation_checkpointing: none, if memory allows: nothing is then computed twice"
    match cause:
        case "input" if analysis.copying > 0.5:
            words = "batches are copied too late: set loader.workers to 1 or more, which uses pinned memory"
            return "loader.workers", words
        case "input" if setup.workers:
            words = f"loader.workers: {2 * setup.workers} instead of {setup.workers}; "
            return "loader.workers", words + "if the CPUs are busy, preprocess the data before training"
        case "input" if not analysis.gpu:  # training uses the cores itself
            words = "loader.workers: 1 or more, if cores are free; else preprocess the data before training"
            return "loader.workers", words
        case "input":
            return "loader.workers", "loader.workers: 4, to prepare batches while the GPU trains on the last one"
        case "compute" if not analysis.gpu:
            return "", "it computes all the time; a machine with a GPU or more processes would be faster"
        case "compute" if setup.bf16:
            return "precision", "precision: auto, to use the GPU's tensor cores in 16 bits"
        case "compute" if not setup.compiled:
            return "compile", "compile: true"
        case "compute":
            return "", "it computes all the time; a faster GPU or more GPUs would be faster"
        case "communication" if setup.parallel == "fsdp":
            return "parallel", "parallel: ddp if the model fits one GPU; else GPUs connected by NVLink"
        case "communication":
            instead = "a machine with GPUs connected by NVLink" if analysis.gpu else "fewer processes"
            instead = "fewer, larger machines" if setup.nodes > 1 else instead
            words = f"a larger batch_size, for the same communication; or {instead}"
            return "batch_size", f"{words}. If one rank is slower than the others, all ranks wait for it here"
        # On a CPU, compiling costs more than most runs gain. Measured: compiling the quickstart's GPT took two minutes
        # and saved a fifth of a 0.1 s step.
        case "memory" if analysis.gpu and not setup.compiled:
            return "compile", "compile: true, which fuses elementwise operators into one pass over memory"
        case "memory" if analysis.gpu and setup.bf16:
            return "precision", "precision: auto: 16-bit numbers move half as many bytes"
        case "memory" if setup.checkpointing != "none":
            return "activation_checkpointing", recompute
        case "memory" if analysis.gpu:
            return "", "fewer or fused operators in the model, to move less memory"
        case "memory":
            return "", "a machine with a GPU, whose memory is many times faster"
        case "launch_overhead" if setup.accumulates:
            return "micro_batch_size", "a larger micro_batch_size: fewer and larger operators"
        case "launch_overhead" if analysis.gpu and not setup.compiled:
            return "compile", "compile: true, which fuses small operators into few large ones"
        case "launch_overhead" if analysis.gpu and not setup.cuda_graphs:
            return "cuda_graphs", "cuda_graphs: true, which launches a whole pass at once"
        case "launch_overhead":
            return "batch_size", "a larger batch_size: the same number of larger operators"
        case "host_sync" if analysis.sync_outside > 0.5:
            words = f"log_every: {max(10, 10 * setup.log_every)} instead of {setup.log_every}: "
            return "log_every", words + "each time metrics are read, the host waits for the GPU"
        case "host_sync":
            reads = "(.item(), .cpu(), print, `if tensor`)"
            return "", f"the model or the loss reads a value in each step {reads}: keep it on the GPU"
        case "optimizer":
            return "batch_size", "a larger batch_size: fewer updates for the same data"
        case "allocation":
            words = "a smaller micro_batch_size: the GPU's memory is nearly full, "
            return "micro_batch_size", words + "so PyTorch has to free and reallocate blocks"
        case "other":
            return "log_every", "a larger log_every, and less frequent evaluations and checkpoints"


# --- Output ---------------------------------------------------------------------------------------------------------


def shown(verdict: Verdict) -> str:
    """Return the verdict as lines of at most WIDTH columns."""
    steps = plural(verdict.steps, "step")
    which = f"{steps.partition(' ')[2]} {verdict.which}" if verdict.which else steps
    head = f"profile of {which}: bound by {verdict.bound.replace('_', ' ')}"
    lines = [line for sentence in verdict.sentences for line in _wrapped(sentence, " " * (5 - sentence.index(" ")))]
    return "\n".join([head, *lines, *_wrapped(f"First: {verdict.advice}.", "  ")])


def _wrapped(sentence: str, indent: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=" " * 6)


def as_data(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as plain data for the metrics and verdict.json, with rounded numbers."""
    return {
        "bound": verdict.bound,
        "shares": {cause: round(share, 4) for cause, share in verdict.shares.items()},
        "sentences": list(verdict.sentences),
        "change": verdict.change,
        "advice": verdict.advice,
        "steps": verdict.steps,
        "step_s": round(verdict.seconds, 6),
        "kernels": [
            {"name": kernel.name, "ms": round(kernel.seconds * 1000, 4), "calls": round(kernel.calls, 2)}
            for kernel in verdict.kernels
        ],
    }
