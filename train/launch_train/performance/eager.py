"""Optimizers and DDP that don't import torch's compiler.

torch 2.13 wraps their methods to exclude them from compiled code, and imports torch._dynamo (with SymPy) for it: about
a second per start on every rank. The trainer compiles models or their blocks, never an optimizer's step, and DDP's own
code only with a whole model.

A process that trains one step on a CPU takes 2.0 s of CPU time with this module, and 3.0 s with torch's own AdamW
(torch 2.13, 2026-11-28; median of 5 alternating starts, `eager_optimizer` returning `base`: LAUNCH_CONFIG='{"model":
{"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}, "data": "synthetic", "steps": 1, "batch_size": 2,
"optimizer": {"warmup_steps": 1}}' bash -c 'time python -m launch_train'). A run that compiles its model (`compile:
auto` on Ampere GPUs and later) imports the compiler in any case and saves nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

OptimizerType = TypeVar("OptimizerType", bound=torch.optim.Optimizer)

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def eager_optimizer(base: type[OptimizerType]) -> type[OptimizerType]:
    """Return a subclass of `base` with the same name and arithmetic, without the compiler's wrappers."""
    methods: dict[str, Callable[..., Any]] = {name: inspect.unwrap(getattr(base, name)) for name in _METHODS}
    methods["step"] = torch.no_grad()(inspect.unwrap(base.step))  # torch adds its step hooks again
    return type(base.__name__, (base,), methods)


class EagerDDP(DistributedDataParallel):
    """DDP that is not part of a compiled forward pass."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        with _without_dynamo():
            super().__init__(*args, **settings)

    _inside_ddp_forward = contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))


@contextmanager
def _without_dynamo() -> Iterator[None]:
    """Replace torch._dynamo while DDP reads from its settings whether to compile DDP's hooks (by default: no)."""
    if "_dynamo" in vars(torch):  # imported already, and perhaps configured
        yield
        return
    # what get_optimize_ddp_mode() returns with torch's default settings
    stub = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = stub
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stub:
            del vars(torch)["_dynamo"]
