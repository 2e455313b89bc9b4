"""Errors of the training processes. The exit code of each tells the node what to do."""

from __future__ import annotations

from typing import ClassVar

from launch_train.common.contract import Exit


class TrainError(Exception):
    """An expected error. Its text is for the user: one or a few plain lines, no traceback."""

    exit: ClassVar[Exit] = Exit.FAILED


class UsageError(TrainError):
    """The config, the code, the data or the number of processes is invalid; a restart can't help."""

    exit = Exit.USAGE


class ConfigError(UsageError):
    """`run.config` is invalid; the text lists all problems."""


class UnfitError(TrainError):
    """This machine can't do the work; another one may."""

    exit = Exit.UNFIT


class OutputError(TrainError):
    """The run folder can't be used."""

    exit = Exit.UNFIT


class OutOfMemoryError(TrainError):
    """The device ran out of memory; another start may use smaller micro-batches."""


class NonFiniteError(UsageError):
    """Too many consecutive steps, up to `step`, had gradients that are not finite; a restart would come to the same."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class DisagreementError(TrainError):
    """The ranks' parameters or moments differ: the result must not be trusted."""

    exit = Exit.DISAGREED


class SupersededError(TrainError):
    """Another start of the same run has taken over its run folder."""

    exit = Exit.SUPERSEDED


class PreemptedError(TrainError):
    """The process was interrupted after saving."""

    exit = Exit.PREEMPTED


def innermost_error(error: BaseException) -> BaseException:
    """Return the socket's error, which urllib3's and requests' errors wrap."""
    while True:
        inner = getattr(error, "reason", None)
        if not isinstance(inner, BaseException):
            inner = next((each for each in reversed(error.args) if isinstance(each, BaseException)), None)
        if inner is None:
            return error
        error = inner
