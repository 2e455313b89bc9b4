"""torch.compile: decide what to compile, try it with one pass, and continue without it if that fails."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from launch_train.common.config import Config
from launch_train.common.decisions import Choice
from launch_train.common.storage import OutputError, Storage
from launch_train.distributed.process_group import Ranks, barrier, gather
from launch_train.models import blocks
from launch_train.models.layers import losses

MIN_BLOCK_SHARE = 0.5
"""Smallest share of the model's parameters in repeated blocks for which compiling only the blocks is worthwhile."""

BACKEND = "inductor"

SPARE_GRAPHS = 8
"""Graphs per function beyond one per block (other shapes, evaluation). torch stops compiling after 8 by default."""

Forward = Callable[..., Any]
TrialPass = Callable[..., AbstractContextManager[object]]
"""Runs a forward and a backward pass through a `Forward`; the gradients exist inside the context only. With
`evaluates=True` it runs a forward pass as in an evaluation."""


class CompilePlan(NamedTuple):
    """What to compile (nothing, each of the `blocks` in place, or the whole model), and why."""

    mode: Literal["off", "regional", "whole"]
    why: str
    blocks: tuple[nn.Module, ...] = ()
    losses: tuple[nn.Module, ...] = ()
    """Loss modules, compiled separately: they read and write more memory than a block."""
    cuda_graphs: Choice | None = None
    """Set if the spec enables CUDA graphs: all kernels of a pass are launched together."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        compiled = Choice("compile", {"off": "false"}.get(self.mode, self.mode), self.why)
        return (compiled, self.cuda_graphs) if self.cuda_graphs else (compiled,)


def make_plan(model: nn.Module, config: Config, ranks: Ranks, *, accumulates: bool = False) -> CompilePlan:
    """Decide what to compile.

    auto compiles on Ampere and newer GPUs if there is a C compiler, which Triton needs. On a CPU compilation costs more
    than a short run gains. Identical blocks are compiled one by one: the compiler runs once for all of them.
    """
    enabled, why = _is_enabled(config, ranks)
    cuda_graphs = None
    if config.cuda_graphs:
        # A graph writes its results, gradients included, to the same memory in each pass: they can't accumulate.
        against = "gradients accumulate over micro-batches" if accumulates else ""
        against = against if enabled else "needs compile: true"
        cuda_graphs = Choice("cuda graphs", "false" if against else "true", against or "set in the spec")
    if not enabled:
        return CompilePlan("off", why, cuda_graphs=cuda_graphs)
    if cuda_graphs and cuda_graphs.chosen == "true":
        return CompilePlan("whole", "CUDA graphs capture a whole pass", cuda_graphs=cuda_graphs)
    if config.compile == "whole":
        return CompilePlan("whole", why, cuda_graphs=cuda_graphs)
    repeated = tuple(blocks(model))
    inside = sum({id(p): p.numel() for block in repeated for p in block.parameters()}.values())
    if not repeated:
        why = "the model has no repeated blocks"
    elif len({tuple((name, p.shape, p.dtype) for name, p in block.named_parameters()) for block in repeated}) > 1:
        why = "the model's blocks differ"
    elif inside < MIN_BLOCK_SHARE * sum(p.numel() for p in model.parameters()):
        why = "most parameters are outside the blocks"
    else:
        return CompilePlan("regional", f"{len(repeated)} identical blocks", repeated, tuple(losses(model)), cuda_graphs)
    return CompilePlan("whole", why, cuda_graphs=cuda_graphs)


def _is_enabled(config: Config, ranks: Ranks) -> tuple[bool, str]:
    if config.compile is not None:
        return bool(config.compile), "set in the spec"
    if ranks.device.type != "cuda" or torch.cuda.get_device_capability(ranks.device) < (8, 0):
        return False, "worthwhile on Ampere or newer GPUs only"
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        return False, "needs a C compiler (cc, gcc or clang); none found"
    return True, "Ampere or newer GPU"


@contextmanager
def compiled_for_trial(model: nn.Module, plan: CompilePlan) -> Iterator[Forward]:
    """Inside the context, compile the model by `plan`, once per shape, without DDP and CUDA graphs, to find out how
    many samples fit. On exit nothing remains compiled; torch finds the kernels again in its disk cache."""
    from torch import _dynamo

    _configure(plan)
    try:
        with _dynamo.config.patch(automatic_dynamic_shapes=False):  # training has one shape
            yield torch.compile(model, backend=BACKEND) if plan.mode == "whole" else model
    finally:
        _undo_compile(plan)


class CompiledModel(NamedTuple):
    """`forward` for training, in DDP if there are several ranks, compiled if `choices` say so; `eval_forward`, the same
    without DDP."""

    forward: Forward
    eval_forward: Forward
    choices: tuple[Choice, ...]


def compile_model(
    model: nn.Module,
    wrap: Callable[[], Forward],
    plan: CompilePlan,
    ranks: Ranks,
    trial_pass: TrialPass,
    storage: Storage | None,
    *,
    evaluates: bool,
) -> CompiledModel:
    """Compile what `wrap` returns (the model, in DDP if there are several ranks) by `plan`.

    If compilation fails on one rank, no rank compiles. Compiled code is loaded from the run folder if an earlier start
    saved it there, and saved there.
    """
    if plan.mode == "off":
        return CompiledModel(wrap(), model, plan.choices)
    name = cache_name(model, plan.mode, ranks.device)
    cached = load_cache(storage, name)
    started = time.monotonic()
    _configure(plan)
    # Blocks are tried before DDP exists: its hooks are on the parameters and run in any backward pass.
    wrapped = wrap() if plan.mode == "whole" else None
    forward: Forward = model
    if wrapped:
        uses_graphs = plan.cuda_graphs is not None and plan.cuda_graphs.chosen == "true"
        forward = torch.compile(wrapped, backend=BACKEND, mode="reduce-overhead" if uses_graphs else None)
        forward = MarkStepBegin(forward) if uses_graphs else forward
    failure = try_pass(forward, ranks, trial_pass)
    duration = f"{time.monotonic() - started:.0f} s{', cached' if cached else ''}"
    if failure:
        _undo_compile(plan)
        return CompiledModel(wrapped or wrap(), model, (Choice("compile", "false", f"it failed: {failure}"),))
    choices = plan._replace(why=f"{plan.why} ({duration})").choices
    eval_forward: Forward = model
    if wrapped and evaluates:
        # A separate graph without gradients and without DDP, which would broadcast the buffers in each pass. Compiled
        # once: evaluation batches have the shape of the micro-batches.
        eval_forward = torch.compile(model, backend=BACKEND)
        if failure := try_pass(eval_forward, ranks, partial(trial_pass, evaluates=True)):
            eval_forward, choices = model, (*choices, Choice("evaluation", "not compiled", f"it failed: {failure}"))
    save_cache(storage, name, ranks)
    return CompiledModel(forward if wrapped else wrap(), eval_forward, choices)


def _configure(plan: CompilePlan) -> None:
    """Configure the compiler and mark the blocks. torch compiles on the first call."""
    from torch import _dynamo

    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)  # also configures the compiler
    logging.getLogger("torch._dynamo.variables.higher_order_ops").setLevel(logging.ERROR)  # long logs on checkpointing
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # torch itself reads it
    _dynamo.config.recompile_limit = len(plan.blocks) + SPARE_GRAPHS
    # Off for blocks: it splits graphs at the ends of DDP's buckets, and the blocks are such splits already.
    _dynamo.config.optimize_ddp = plan.mode == "whole"
    for module in (*plan.blocks, *plan.losses):
        module.compile(backend=BACKEND)


class MarkStepBegin:
    """Marks the begin of each step: the outputs of the previous step's CUDA graphs may be overwritten."""

    def __init__(self, forward: Any) -> None:
        self.forward, self._orig_mod = forward, forward._orig_mod

    def __call__(self, *batch: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self.forward(*batch)


def _undo_compile(plan: CompilePlan) -> None:
    from torch import _dynamo

    for module in (*plan.blocks, *plan.losses):
        module._compiled_call_impl = None
    _dynamo.reset()


def try_pass(forward: Forward, ranks: Ranks, trial_pass: TrialPass) -> str | None:
    """Run a pass through `forward` on all ranks. Return the first rank's failure, or None.

    The pass does not communicate, so a rank that fails blocks no other.
    """
    failure = ""
    try:
        with trial_pass(forward):
            pass
    except Exception as error:  # noqa: BLE001 - a compiler may fail in any way; a fault of the model shows in step 1
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failure = f"{type(error).__name__}: {' '.join(lines[:2])[:120]}"
    barrier(ranks)  # not a collective: the ranks may need different times to compile
    return next((f"rank {rank}: {each}" for rank, each in enumerate(gather(ranks, failure)) if each), None)


# --- Compiled code in the run folder: later starts of the run don't compile again -------------------------------------
# On each machine torch also caches it on disk, shared by the ranks of a node (TORCHINDUCTOR_CACHE_DIR).

CACHE_FOLDER = "compile/"

DIGEST_BYTES = 32
"""The SHA-256 of compiled code, in front of it."""

TIMEOUT_SECONDS = 30.0
"""Time limit for reading or writing an object. On a timeout the model is just compiled again."""


def cache_name(model: nn.Module, mode: str, device: torch.device) -> str:
    """Return `compile/<key>.bin` for this machine type and model; one object per GPU, whose number is in the code.

    The key need not change with the code: torch looks each graph up by its content.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    shapes = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    key = "\n".join([torch.__version__, platform.python_version(), gpu, mode, type(model).__name__, *shapes])
    number = f"-{device.index or 0}" if device.type == "cuda" else ""
    return f"{CACHE_FOLDER}{hashlib.sha256(key.encode()).hexdigest()[:16]}{number}.bin"


def load_cache(storage: Storage | None, name: str) -> bool:
    """Load the code that an earlier start compiled. Return whether there was any."""
    if storage is None:
        return False
    try:
        data = storage.within(TIMEOUT_SECONDS).read(name)
        digest, content = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:  # damaged content must not be unpickled
            raise ValueError("checksum mismatch")
        return torch.compiler.load_cache_artifacts(content) is not None
    except FileNotFoundError:
        return False
    except Exception as error:  # noqa: BLE001 - perhaps from another version of torch: compile again
        ours = isinstance(error, (OutputError, ValueError))
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        print(f"compile cache {name} is not usable, compiling from scratch: {reason}", flush=True)
        return False


def save_cache(storage: Storage | None, name: str, ranks: Ranks) -> None:
    """Save what this process has compiled, if anything. Only the first node saves, one process per object."""
    if storage is None or ranks.rank != ranks.local_rank or (ranks.device.type != "cuda" and ranks.rank):
        return
    from torch._dynamo.utils import counters

    if not counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]:
        return  # all graphs were in torch's cache
    try:
        if artifacts := torch.compiler.save_cache_artifacts():
            content = artifacts[0]
            storage.within(TIMEOUT_SECONDS).write(name, hashlib.sha256(content).digest() + content)
    except Exception as error:  # noqa: BLE001 - training continues; the next start compiles again
        print(f"compile cache not saved; the next start compiles again: {type(error).__name__}: {error}", flush=True)
