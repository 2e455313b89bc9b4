"""Run one process of the built-in trainer: `torchrun … -m launch_train`, or `python -m launch_train` alone.

Its settings are JSON in LAUNCH_CONFIG.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from launch_train.common import contract
from launch_train.common.config import parse
from launch_train.common.errors import ConfigError, UsageError
from launch_train.common.process_exit import exit_process, run_program

if TYPE_CHECKING:
    from launch_train.distributed.process_group import Ranks


def main() -> NoReturn:
    """Train. The settings are checked before torch is imported, which takes seconds."""
    rank = int(os.environ.get("RANK") or 0)
    ranks: Ranks | None = None

    def work() -> NoReturn:
        nonlocal ranks
        config = parse(read_config(os.environ.get(contract.CONFIG) or "{}"))
        with garbage_collection_paused():
            from launch_train.distributed import process_group
            from launch_train.trainer import train
        ranks = process_group.join(os.environ)
        train.train(config, ranks, os.environ)
        process_group.finish(ranks)

    exit_process(run_program("train", work, lambda error: _should_report(ranks, rank, error)), rank=rank)


def _should_report(ranks: Ranks | None, rank: int, error: BaseException) -> bool:
    """Return whether this rank prints the error.

    Before the ranks are joined, a UsageError is the same on all of them, so rank 0 alone prints it. This must work
    without torch, whose import may be what failed.
    """
    if ranks is None:
        return rank == 0 or not isinstance(error, UsageError)
    from launch_train.distributed import process_group

    return process_group.should_report(ranks, error)


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection, then exempt all objects that exist by then from it.

    Imports create about a million objects that stay. Collecting among them takes a fifth of the import time, and later
    a tenth of a second at a time, while the other ranks wait for this one.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def read_config(text: str) -> dict[str, Any]:
    """Parse LAUNCH_CONFIG. Raises ConfigError if it isn't a JSON object."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{contract.CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{contract.CONFIG} is not a JSON object: {text[:60]}")
    return config


if __name__ == "__main__":
    main()
