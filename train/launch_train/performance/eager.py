"""Optimizers and DDP without torch's compiler.

torch 2.13 wraps their methods to keep them out of compiled code, and loads torch._dynamo (with SymPy) to do so: a
second of every start, on every rank. The trainer compiles models or their blocks, never an optimizer's step; and DDP's
own code is compiled only with a whole model.

What it saves: a process that trains one step on a CPU takes 2.0 s of CPU time with it, and 4.1 s with torch's own AdamW
(torch 2.13; median of 5 starts each, in turns, `optimizer` returning `base`: LAUNCH_CONFIG='{"model": {"n_layer": 1,
"n_head": 1, "n_embd": 8, "block_size": 8}, "data": "synthetic", "steps": 1, "batch_size": 2, "optimizer":
{"warmup_steps": 1}}' bash -c 'time python -m launch_train'). A run that compiles its model (`compile: auto` on Ampere
GPUs and later) loads the compiler in any case, and saves nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

Some = TypeVar("Some", bound=torch.optim.Optimizer)

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


def optimizer(base: type[Some]) -> type[Some]:
    """`base` with the same name and the same arithmetic, whose methods are nothing to a compiler."""
    methods: dict[str, Callable[..., Any]] = {name: inspect.unwrap(getattr(base, name)) for name in _METHODS}
    methods["step"] = torch.no_grad()(inspect.unwrap(base.step))  # torch's hooks are off, too: it adds them by itself
    return type(base.__name__, (base,), methods)


class EagerDDP(DistributedDataParallel):
    """DDP for a forward pass in which it isn't compiled itself."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        with _compiler_unasked():
            super().__init__(*args, **settings)

    _inside_ddp_forward = contextmanager(inspect.unwrap(DistributedDataParallel._inside_ddp_forward))


@contextmanager
def _compiler_unasked() -> Iterator[None]:
    """DDP asks the compiler's settings whether its hooks are to be compiled, which they are not by default."""
    if "_dynamo" in vars(torch):  # it is loaded: it may have been told something
        yield
        return
    # get_optimize_ddp_mode() with the settings that torch has from the start
    told = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = told
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is told:
            del vars(torch)["_dynamo"]
