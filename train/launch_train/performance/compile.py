"""torch.compile: what of a model is compiled, a first pass that shows whether it works, and going without it if not."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from launch_train.common.config import Config
from launch_train.common.decisions import Choice
from launch_train.common.storage import Storage
from launch_train.distributed.process_group import Ranks, barrier, gather
from launch_train.models import blocks
from launch_train.models.losses import losses
from launch_train.performance import compile_cache

MOST = 0.5
"""Blocks that hold this part of a model's parameters are worth being compiled alone."""

BACKEND = "inductor"

SPARE_GRAPHS = 8
"""Graphs that torch may make of one function beyond one for each block (other shapes, evaluation): its default is 8 in
all, after which it stops compiling."""

Forward = Callable[..., Any]
Pass = Callable[..., AbstractContextManager[object]]
"""One forward and backward pass through it, whose gradients are there inside the context, and gone after it. With
`evaluates` it is a forward pass as evaluations make it."""


class Plan(NamedTuple):
    """What is compiled: nothing, each of the `blocks` in its place, or the whole model; and why."""

    mode: Literal["off", "regional", "whole"]
    why: str
    blocks: tuple[nn.Module, ...] = ()
    beside: tuple[nn.Module, ...] = ()
    """What is compiled alone beside the blocks: the loss, which reads and writes more than a block does."""
    graphs: Choice | None = None
    """CUDA graphs, where the spec asks for them: the kernels of a pass are started together."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        compiled = Choice("compile", {"off": "false"}.get(self.mode, self.mode), self.why)
        return (compiled, self.graphs) if self.graphs else (compiled,)


def plan(model: nn.Module, config: Config, ranks: Ranks, *, accumulates: bool = False) -> Plan:
    """auto: on Ampere GPUs and later, if there is a C compiler, which Triton needs. On the CPU it costs more than a
    short run gains. Blocks that are all alike are compiled one by one, and the compiler works once for all of them."""
    wanted, why = _wanted(config, ranks)
    graphs = _graphs(wanted, accumulates) if config.cuda_graphs else None
    if not wanted:
        return Plan("off", why, graphs=graphs)
    if graphs and graphs.chosen == "true":
        return Plan("whole", "CUDA graphs hold all of a pass", graphs=graphs)
    if config.compile == "whole":
        return Plan("whole", why, graphs=graphs)
    found = tuple(blocks(model))
    if against := _against(found, model):
        return Plan("whole", against, graphs=graphs)
    return Plan("regional", f"{len(found)} blocks alike", found, tuple(losses(model)), graphs)


def _against(found: Sequence[nn.Module], model: nn.Module) -> str | None:
    """Why these blocks are not worth being compiled alone; None: they are."""
    if not found:
        return "no blocks repeat in it"
    if not alike(found):
        return "its blocks aren't alike"
    return "most parameters are outside its blocks" if _share(found, model) < MOST else None


def _graphs(compiles: bool, accumulates: bool) -> Choice:
    """A graph writes its results, gradients too, to the same place each time: they last for one pass."""
    if not compiles:
        return Choice("cuda graphs", "false", "they need compile: true")
    if accumulates:
        return Choice("cuda graphs", "false", "gradients of several passes add up")
    return Choice("cuda graphs", "true", "the spec says so")


def _wanted(config: Config, ranks: Ranks) -> tuple[bool, str]:
    if config.compile is not None:
        return bool(config.compile), "the spec says so"
    if ranks.device.type != "cuda" or torch.cuda.get_device_capability(ranks.device) < (8, 0):
        return False, "it pays on GPUs from Ampere on"
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return False, "there is no C compiler (cc, gcc, clang) here"
    return True, "a GPU from Ampere on"


def alike(found: Sequence[nn.Module]) -> bool:
    """Whether all have parameters of the same names, shapes and types: one graph then fits them all."""
    return len({tuple((name, p.shape, p.dtype) for name, p in one.named_parameters()) for one in found}) == 1


def _share(found: Sequence[nn.Module], model: nn.Module) -> float:
    inside = {id(p): p.numel() for one in found for p in one.parameters()}
    return sum(inside.values()) / max(1, sum(p.numel() for p in model.parameters()))


@contextmanager
def trial(model: nn.Module, plan: Plan) -> Iterator[Forward]:
    """Inside the context, compile the model as `plan` says, once per shape, without DDP and CUDA graphs: to find out
    how many samples fit. On exit nothing remains compiled; torch finds the kernels again in its disk cache."""
    from torch import _dynamo

    _prepare(plan)
    try:
        with _dynamo.config.patch(automatic_dynamic_shapes=False):  # training has one shape
            yield torch.compile(model, backend=BACKEND) if plan.mode == "whole" else model
    finally:
        _undo(plan)


class Compiled(NamedTuple):
    """`forward` is compiled, or as it was; the `choices` say which. `evaluated` is for evaluations: without DDP, and
    compiled in the same way."""

    forward: Forward
    evaluated: Forward
    choices: tuple[Choice, ...]


def compiled(
    model: nn.Module,
    wrap: Callable[[], Forward],
    plan: Plan,
    ranks: Ranks,
    first: Pass,
    storage: Storage | None,
    *,
    evaluates: bool,
) -> Compiled:
    """What `wrap` returns (the model, perhaps in DDP) as `plan` says. All ranks go without it if one can't compile it.

    What the compiler makes comes from the run folder if an earlier start has left it there, and is left there.
    """
    if plan.mode == "off":
        return Compiled(wrap(), model, plan.choices)
    name = compile_cache.name(model, plan.mode, ranks.device)
    found = compile_cache.load(storage, name)
    began = time.monotonic()
    _prepare(plan)
    # Blocks are tried before DDP is there: its hooks are on the parameters, whoever is called.
    wrapped = wrap() if plan.mode == "whole" else None
    forward = _whole(wrapped, plan) if wrapped else model
    wrong = tried(forward, ranks, first)
    took = f"{time.monotonic() - began:.0f} s{', cached' if found else ''}"
    if wrong:
        _undo(plan)
        return Compiled(wrapped or wrap(), model, (Choice("compile", "false", f"it failed: {wrong}"),))
    evaluated, told = _evaluated(model, ranks, first) if wrapped and evaluates else (model, ())
    compile_cache.keep(storage, name, ranks)
    choices = *plan._replace(why=f"{plan.why} ({took})").choices, *told
    return Compiled(forward if wrapped else wrap(), evaluated, choices)


def _evaluated(model: nn.Module, ranks: Ranks, first: Pass) -> tuple[Forward, tuple[Choice, ...]]:
    """Return the whole model for evaluations: a separate graph without gradients, compiled once before training, as its
    batches have the shape of the micro-batches. It has no DDP, which would broadcast the buffers in each pass."""
    evaluated = torch.compile(model, backend=BACKEND)
    wrong = tried(evaluated, ranks, partial(first, evaluates=True))
    return (model, (Choice("evaluation", "not compiled", f"it failed: {wrong}"),)) if wrong else (evaluated, ())


def _prepare(plan: Plan) -> None:
    """Nothing is compiled yet: torch does that when it is called."""
    from torch import _dynamo

    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)  # this one tells the compiler, too
    logging.getLogger("torch._dynamo.variables.higher_order_ops").setLevel(logging.ERROR)  # on checkpoints, at length
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch looks at it itself
    _dynamo.config.recompile_limit = len(plan.blocks) + SPARE_GRAPHS
    # Else graphs are cut where DDP's buckets end: blocks are such cuts themselves.
    _dynamo.config.optimize_ddp = plan.mode == "whole"
    for block in (*plan.blocks, *plan.beside):
        block.compile(backend=BACKEND)


def _whole(wrapped: Forward, plan: Plan) -> Forward:
    graphs = plan.graphs is not None and plan.graphs.chosen == "true"
    whole = torch.compile(wrapped, backend=BACKEND, mode="reduce-overhead" if graphs else None)
    return Marked(whole) if graphs else whole


class Marked:
    """Says where a step begins: what the CUDA graphs of the one before have left may be written over."""

    def __init__(self, forward: Any) -> None:
        self.forward, self._orig_mod = forward, forward._orig_mod

    def __call__(self, *batch: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.forward(*batch)


def _undo(plan: Plan) -> None:
    from torch import _dynamo

    for block in (*plan.blocks, *plan.beside):
        block._compiled_call_impl = None
    _dynamo.reset()


def tried(forward: Forward, ranks: Ranks, first: Pass) -> str | None:
    """What is wrong with a pass through `forward` on any rank; None: nothing. No rank waits for another in the pass, so
    that one which fails leaves nobody behind."""
    wrong = _passed(forward, first)
    barrier(ranks)  # ranks may compile for different times
    return next((f"rank {rank}: {each}" for rank, each in enumerate(gather(ranks, wrong)) if each), None)


def _passed(forward: Forward, first: Pass) -> str | None:
    try:
        with first(forward):
            return None
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; what the model does wrong, a step shows
        return _short(error)


def _short(error: Exception) -> str:
    """`BackendCompilerFailed: …`: what it says at first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:120]}"
