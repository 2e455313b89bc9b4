"""One process of a run: `torchrun … -m launch_train`, or `python -m launch_train` alone. Its settings are JSON in
LAUNCH_CONFIG."""

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
from launch_train.common.process_exit import done, leave

if TYPE_CHECKING:
    from launch_train.distributed.process_group import Ranks


def main() -> NoReturn:
    """Settings are checked before torch, which takes seconds to load."""
    rank = int(os.environ.get("RANK") or 0)
    ranks: Ranks | None = None

    def work() -> NoReturn:
        nonlocal ranks
        config = parse(read_config(os.environ.get(contract.CONFIG) or "{}"))
        with without_garbage():
            from launch_train.distributed import process_group
            from launch_train.trainer import train
        ranks = process_group.join(os.environ)
        train.train(config, ranks, os.environ)
        process_group.finish(ranks)

    leave(done("train", work, lambda error: _speaks(ranks, rank, error)), rank=rank)


def _speaks(ranks: Ranks | None, rank: int, error: BaseException) -> bool:
    """Whether this rank prints its error. What is wrong in the config is so on all ranks, and told without torch; which
    may be what can't be loaded."""
    if ranks is None:
        return rank == 0 or not isinstance(error, UsageError)
    from launch_train.distributed import process_group

    return process_group.speaks(ranks, error)


@contextmanager
def without_garbage() -> Iterator[None]:
    """Imports make a million objects that stay. To look for garbage among them takes a fifth of their time, and later,
    again and again, a tenth of a second in which the other ranks wait for this one."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def read_config(text: str) -> dict[str, Any]:
    """LAUNCH_CONFIG. Raises ConfigError if it isn't a JSON object."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{contract.CONFIG} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{contract.CONFIG} is not a JSON object: {text[:60]}")
    return config


if __name__ == "__main__":
    main()
