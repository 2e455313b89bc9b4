"""The user's own model and loss: functions of theirs, made into a module that returns the mean loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from train.config import Foreign
from train.errors import TrainError, UsageError
from train.usercode import Own, load, said


def build(shape: Foreign, loss: str | None) -> nn.Module:
    """What `my_pkg.model:build` makes of its settings. Raises UsageError: it fails, or makes no model."""
    own = load(shape.name, "model")
    model = own(**shape.settings)
    if not isinstance(model, nn.Module):
        raise own.wrong(f"returned {_kind(model)}, not a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise own.wrong(f"returned a {type(model).__name__} without parameters")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise own.wrong(f"returned a {type(model).__name__} all of whose parameters are frozen")
    return with_loss(model, loss) if loss else Whole(model, f"model: {shape.name}")


def with_loss(model: nn.Module, loss: str) -> nn.Module:
    """`model` with the user's own loss. Raises UsageError: there is no such function."""
    own = load(loss, "loss")
    if isinstance(own.function, type):
        raise own.wrong("is a class; it must be a function (or a made object) of (outputs, targets)")
    return Judged(model, own)


class Whole(nn.Module):
    """A model whose forward(inputs, targets) is the loss."""

    def __init__(self, model: nn.Module, what: str) -> None:
        super().__init__()
        self.model, self._what, self._works = model, what, False

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        if self._works or torch.compiler.is_compiling():
            return checked(staying(lambda: self.model(inputs, targets), self._what), self._what)
        loss = checked(first(lambda: self.model(inputs, targets), self._what, CALLED), self._what)
        self._works = True
        return loss


class Judged(nn.Module):
    """A model whose forward(inputs) is judged by a function of the user's: loss(outputs, targets)."""

    def __init__(self, model: nn.Module, own: Own) -> None:
        super().__init__()
        self.model = model
        self._loss: Callable[[Any, Any], Any] = own.function
        self._what = f"loss: {own.name}"
        self._works = False

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        if self._works or torch.compiler.is_compiling():
            return checked(staying(lambda: self._loss(self.model(inputs), targets), self._what), self._what)
        outputs = first(lambda: self.model(inputs), "model")
        loss = checked(first(lambda: self._loss(outputs, targets), self._what), self._what)
        self._works = True
        return loss


CALLED = " (without `loss` the trainer calls model(inputs, targets))"


def first(call: Callable[[], Any], what: str, hint: str = "") -> Any:
    """What the user's code returns when it is first called with a batch: until then nobody knows that it works.

    Raises UsageError, in one line with the place, for whatever it raises but a lack of memory.
    """
    try:
        return call()
    except (TrainError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        called = hint if isinstance(error, TypeError) and "argument" in str(error) else ""
        raise UsageError(f"{what} failed {said(error)}{called}") from error


def staying(call: Callable[[], Any], what: str) -> Any:
    """What the user's code returns with a later batch. What it raises is told as Python does; but if it leaves by
    sys.exit(0), the run would look done. Raises UsageError."""
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except SystemExit as error:
        raise UsageError(f"{what} left {said(error)}") from error


def checked(loss: Any, what: str) -> Tensor:
    """The loss, if it is one. It costs nothing to look at each: no value is asked for.

    Raises UsageError: it is no tensor of one number, or no gradient leads to it.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(f"{what} returned {_kind(loss)} for a batch; the trainer needs the mean loss, a tensor")
    if loss.dim() != 0:
        raise UsageError(
            f"{what} returned a tensor of the shape {list(loss.shape)}; the trainer needs the mean loss, one number"
            + ("" if what.startswith("loss") else " (`loss: my_pkg.losses:loss` makes one of a model's outputs)")
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(f"{what} returned a loss that depends on no parameter: no gradient leads from it (detach()?)")
    return loss


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
