"""What a training process can fail with on purpose: each error has the exit code that tells the node what to do."""

from __future__ import annotations

from typing import ClassVar

from launch_train.common.contract import Exit


class TrainError(Exception):
    """The trainer's own error. Its text is for the user: one or a few plain lines, no traceback."""

    exit: ClassVar[Exit] = Exit.FAILED


class UsageError(TrainError):
    """The config, the data or the number of processes can't work; starting again can't help."""

    exit = Exit.USAGE


class ConfigError(UsageError):
    """`run.config` is wrong: all of its problems at once."""


class UnfitError(TrainError):
    """This machine can't do the work; another one may."""

    exit = Exit.UNFIT


class OutputError(TrainError):
    """The run folder can't be written."""

    exit = Exit.UNFIT


class OutOfMemoryError(TrainError):
    """The device's memory is too small for what it was given; another start may take less at a time."""


class NonFiniteError(UsageError):
    """Too many steps in a row, up to `step`, had gradients that are no numbers: a restart would come to the same."""

    def __init__(self, words: str, step: int) -> None:
        super().__init__(words)
        self.step = step


class DisagreementError(TrainError):
    """The ranks' parameters or moments differ: the result must not be trusted."""

    exit = Exit.DISAGREED


class SupersededError(TrainError):
    """Another start of the same run has taken over its run folder."""

    exit = Exit.SUPERSEDED


class PreemptedError(TrainError):
    """Stopped from outside, after all was saved."""

    exit = Exit.PREEMPTED
