"""Custom models and losses: wrap the user's functions in a module that returns the mean loss, or its sum and count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launch_train.common.config import ExternalModel
from launch_train.common.errors import TrainError, UsageError
from launch_train.common.user_import import UserFunction, describe_error, load_function

Loss = Tensor | tuple[Tensor, Tensor]
"""The mean of a batch, or a sum and its count."""


def build(shape: ExternalModel, loss: str | None) -> nn.Module:
    """Build a model with the user's function, such as `my_pkg.model:build`, and its settings.

    Raises UsageError if the function fails, or doesn't return a trainable model.
    """
    own = load_function(shape.name, "model")
    model = own(**shape.settings)
    if not isinstance(model, nn.Module):
        raise own.error(f"returned {_kind(model)}, not a torch.nn.Module")
    if not any(True for _ in model.parameters()):
        raise own.error(f"returned a {type(model).__name__} without parameters")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise own.error(f"returned a {type(model).__name__} with all parameters frozen")
    return with_loss(model, loss) if loss else ModelWithOwnLoss(model, f"model: {shape.name}")


def with_loss(model: nn.Module, loss: str) -> nn.Module:
    """Return `model` with a custom loss. Raises UsageError if there is no such function."""
    own = load_function(loss, "loss")
    if isinstance(own.function, type):
        raise own.error("is a class; it must be a function or an instance, called with (outputs, targets)")
    return ModelWithUserLoss(model, own)


class ModelWithOwnLoss(nn.Module):
    """A model whose forward(inputs, targets) returns the loss."""

    def __init__(self, model: nn.Module, what: str) -> None:
        super().__init__()
        self.model, self._what, self._works = model, what, False

    def forward(self, inputs: Any, targets: Any) -> Loss:
        if self._works or torch.compiler.is_compiling():
            return checked(call_without_exit(lambda: self.model(inputs, targets), self._what), self._what)
        loss = checked(first(lambda: self.model(inputs, targets), self._what, CALLED), self._what)
        self._works = True
        return loss


class ModelWithUserLoss(nn.Module):
    """A model whose outputs, forward(inputs), are passed to a custom loss(outputs, targets)."""

    def __init__(self, model: nn.Module, own: UserFunction) -> None:
        super().__init__()
        self.model = model
        self._loss: Callable[[Any, Any], Any] = own.function
        self._what = f"loss: {own.name}"
        self._works = False

    def forward(self, inputs: Any, targets: Any) -> Loss:
        if self._works or torch.compiler.is_compiling():
            return checked(call_without_exit(lambda: self._loss(self.model(inputs), targets), self._what), self._what)
        outputs = first(lambda: self.model(inputs), "model")
        loss = checked(first(lambda: self._loss(outputs, targets), self._what), self._what)
        self._works = True
        return loss


CALLED = " (without `loss` the trainer calls model(inputs, targets))"


def first(call: Callable[[], Any], what: str, hint: str = "") -> Any:
    """Call the user's code with its first batch, and return the result.

    Any error except out of memory is raised as UsageError, in one line with its place in the user's code.
    """
    try:
        return call()
    except (TrainError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        called = hint if isinstance(error, TypeError) and "argument" in str(error) else ""
        raise UsageError(f"{what} failed {describe_error(error)}{called}") from error


def call_without_exit(call: Callable[[], Any], what: str) -> Any:
    """Call the user's code with a later batch, and return the result.

    Exceptions pass through with their traceback, except SystemExit, which is raised as UsageError: after sys.exit(0)
    the run would seem to have finished.
    """
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except SystemExit as error:
        raise UsageError(f"{what} exited {describe_error(error)}") from error


def checked(loss: Any, what: str) -> Loss:
    """Return the loss after validating its type and shape. No value is read, so this doesn't synchronise with the GPU.

    Raises UsageError if it is not a scalar tensor (or a pair of one and a count), or doesn't depend on a parameter.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        return _checked_sum(loss[0], what), _checked_count(loss[1], loss[0], what)
    return _checked_sum(loss, what)


def _checked_count(count: Any, total: Tensor, what: str) -> Tensor:
    if isinstance(count, int | float):
        return total.new_full((), count, dtype=torch.float32)
    if isinstance(count, Tensor) and count.dim() == 0:
        return count.detach()
    kind = f"a tensor of the shape {list(count.shape)}" if isinstance(count, Tensor) else _kind(count)
    raise UsageError(f"{what} returned a sum with {kind} as its count; the trainer needs one number")


def _checked_sum(loss: Any, what: str) -> Tensor:
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
