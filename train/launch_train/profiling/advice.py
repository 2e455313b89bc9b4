"""Turn an analysis into a verdict: sentences, and the setting to change first. Standard library only."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch_train.common.text import plural
from launch_train.profiling.bottleneck import Analysis, Cause

MIN_SHARE = 0.05
"""Smallest share of the time for which a cause gets a sentence."""

MIN_AVOIDABLE_SHARE = 0.15
"""Smallest share at which another cause is addressed first even if most of the time is computing."""

WIDTH = 60


class Setup(NamedTuple):
    """The run's settings when it was recorded."""

    gpu: bool = False
    nodes: int = 1
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
WORDS_ON_CPU: Mapping[Cause, str] = {
    **WORDS,
    "launch_overhead": "call overhead of very small operators",
    "host_sync": "reading values one by one (.item())",
}

_Condition = Callable[[Analysis, Setup], object]
_ALWAYS: _Condition = lambda analysis, setup: True  # noqa: E731 - a cell of the table
_COMMUNICATION = (
    "a larger batch_size, for the same communication; or {}. If one rank is slower than the others, all ranks wait for"
    " it here"
)

# fmt: off
ADVICE: tuple[tuple[Cause, _Condition, str, str], ...] = (
    ("input", lambda analysis, _: analysis.copying > 0.5,
     "loader.workers", "batches are copied too late: set loader.workers to 1 or more, which uses pinned memory"),
    ("input", lambda _, setup: setup.workers,
     "loader.workers", "loader.workers: {twice_workers} instead of {workers}; if the CPUs are busy, preprocess the data"
     " before training"),
    ("input", lambda analysis, _: not analysis.gpu,  # training uses the cores itself
     "loader.workers", "loader.workers: 1 or more, if cores are free; else preprocess the data before training"),
    ("input", _ALWAYS,
     "loader.workers", "loader.workers: 4, to prepare batches while the GPU trains on the last one"),
    ("compute", lambda analysis, _: not analysis.gpu,
     "", "it computes all the time; a machine with a GPU or more processes would be faster"),
    ("compute", lambda _, setup: setup.bf16,
     "precision", "precision: auto, to use the GPU's tensor cores in 16 bits"),
    ("compute", lambda _, setup: not setup.compiled,
     "compile", "compile: true"),
    ("compute", _ALWAYS,
     "", "it computes all the time; a faster GPU or more GPUs would be faster"),
    ("communication", lambda _, setup: setup.parallel == "fsdp",
     "parallel", "parallel: ddp if the model fits one GPU; else GPUs connected by NVLink"),
    ("communication", lambda _, setup: setup.nodes > 1,
     "batch_size", _COMMUNICATION.format("fewer, larger machines")),
    ("communication", lambda analysis, _: analysis.gpu,
     "batch_size", _COMMUNICATION.format("a machine with GPUs connected by NVLink")),
    ("communication", _ALWAYS,
     "batch_size", _COMMUNICATION.format("fewer processes")),
    # On a CPU, compiling costs more than most runs gain. Measured: compiling the quickstart's GPT took two minutes
    # and saved a fifth of a 0.1 s step.
    ("memory", lambda analysis, setup: analysis.gpu and not setup.compiled,
     "compile", "compile: true, which fuses elementwise operators into one pass over memory"),
    ("memory", lambda analysis, setup: analysis.gpu and setup.bf16,
     "precision", "precision: auto: 16-bit numbers move half as many bytes"),
    ("memory", lambda _, setup: setup.checkpointing != "none",
     "activation_checkpointing", "activation_checkpointing: none, if memory allows: nothing is then computed twice"),
    ("memory", lambda analysis, _: analysis.gpu,
     "", "fewer or fused operators in the model, to move less memory"),
    ("memory", _ALWAYS,
     "", "a machine with a GPU, whose memory is many times faster"),
    ("launch_overhead", lambda _, setup: setup.accumulates,
     "micro_batch_size", "a larger micro_batch_size: fewer and larger operators"),
    ("launch_overhead", lambda analysis, setup: analysis.gpu and not setup.compiled,
     "compile", "compile: true, which fuses small operators into few large ones"),
    ("launch_overhead", lambda analysis, setup: analysis.gpu and not setup.cuda_graphs,
     "cuda_graphs", "cuda_graphs: true, which launches a whole pass at once"),
    ("launch_overhead", _ALWAYS,
     "batch_size", "a larger batch_size: the same number of larger operators"),
    ("host_sync", lambda analysis, _: analysis.sync_outside > 0.5,
     "log_every", "log_every: {rarer} instead of {log_every}: each time metrics are read, the host waits for the GPU"),
    ("host_sync", _ALWAYS,
     "", "the model or the loss reads a value in each step (.item(), .cpu(), print, `if tensor`): keep it on the GPU"),
    ("optimizer", _ALWAYS,
     "batch_size", "a larger batch_size: fewer updates for the same data"),
    ("allocation", _ALWAYS,
     "micro_batch_size", "a smaller micro_batch_size: the GPU's memory is nearly full, so PyTorch has to free and"
     " reallocate blocks"),
    ("other", _ALWAYS,
     "log_every", "a larger log_every, and less frequent evaluations and checkpoints"),
)
# fmt: on
"""Cause, condition, setting of run.config (empty: none helps), text. The first row that applies counts."""


def explain_analysis(analysis: Analysis, setup: Setup) -> dict[str, Any]:
    """Return what limits the run's speed, as the plain data of verdict.json and the metrics.

    It has a sentence per cause, and the first thing to change: that for the largest cause, but for computing only if no
    other cause is large.
    """
    shares = analysis.shares
    causes = sorted((cause for cause in shares if shares[cause] >= MIN_SHARE), key=lambda cause: -shares[cause])
    first: Cause = causes[0] if causes else "other"
    if first in ("compute", "other"):
        avoidable = (cause for cause in causes if cause not in ("compute", "other"))
        first = next((cause for cause in avoidable if shares[cause] >= MIN_AVOIDABLE_SHARE), first)
    change, advice = next(row[2:] for row in ADVICE if row[0] == first and row[1](analysis, setup))
    return {
        "bound": analysis.bound,
        "shares": {cause: round(share, 4) for cause, share in shares.items()},
        "sentences": [f"{shares[cause]:.0%} {_words(cause, analysis)}." for cause in causes],
        "change": change,
        "advice": advice.format(
            workers=setup.workers,
            twice_workers=2 * (setup.workers or 0),
            log_every=setup.log_every,
            rarer=max(10, 10 * setup.log_every),
        ),
        "steps": analysis.steps,
        "step_s": round(analysis.seconds, 6),
        "kernels": [
            {"name": kernel.name, "ms": round(kernel.seconds * 1000, 4), "calls": round(kernel.calls, 2)}
            for kernel in analysis.kernels
        ],
    }


def _words(cause: Cause, analysis: Analysis) -> str:
    if cause == "input" and analysis.copying > 0.5:
        return "copying batches to the GPU, not overlapped with computing"
    if not analysis.gpu:
        return WORDS_ON_CPU[cause]
    return WORDS[cause] + (f" ({analysis.launches:,} kernels per step)" if cause == "launch_overhead" else "")


def format_verdict(verdict: Mapping[str, Any], steps: str = "") -> str:
    """Return the verdict as lines of at most WIDTH columns. `steps`: the numbers of the steps (8-10), if known."""
    count = plural(verdict["steps"], "step")
    which = f"{count.partition(' ')[2]} {steps}" if steps else count
    lines = [f"profile of {which}: bound by {verdict['bound'].replace('_', ' ')}"]
    sentences = {sentence: " " * (5 - sentence.index(" ")) for sentence in verdict["sentences"]}
    for sentence, indent in {**sentences, f"First: {verdict['advice']}.": "  "}.items():
        lines += textwrap.wrap(sentence, WIDTH, initial_indent=indent, subsequent_indent=" " * 6)
    return "\n".join(lines)
