"""Remove old checkpoints, and the unfinished ones of earlier starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from launch_train import runfolder
from launch_train.checkpointing.multipart_writer import WORKERS
from launch_train.common.storage import Storage


def prune(
    storage: Storage,
    step: int,
    start: str,
    *,
    last: int,
    every: int,
    best: Collection[int] = (),
    cancelled: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Remove checkpoints after `start` has saved `step`; return the removed folders.

    Of the steps up to this one the `last` newest, the multiples of `every` (0: none) and those in `best` stay. Later
    steps of earlier starts belong to a checkpoint that was skipped as broken, and are removed like unfinished ones;
    those of `start` itself stay: other ranks may already be writing the next checkpoint. A manifest is deleted before
    its parts.
    """
    names = storage.list(f"{runfolder.CHECKPOINTS}/")
    folders = folders_to_remove(names, step, start, last=last, every=every, best=best)

    def delete(name: str) -> None:
        if not cancelled():
            storage.delete(name)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint") as pool:
        for folder in folders:
            delete(f"{folder}/manifest.json")
            parts = [name for name in names if name.startswith(f"{folder}/") and not name.endswith("/manifest.json")]
            list(pool.map(delete, parts))
    return folders


def folders_to_remove(
    names: Sequence[str], step: int, start: str, *, last: int, every: int, best: Collection[int] = ()
) -> list[str]:
    """Return the folders, of one start and step each, that `prune` removes. Pure."""
    complete = {name.rpartition("/")[0] for name in names if runfolder.MANIFEST.match(name)}
    complete = {folder for folder in complete if folder.rpartition("/")[2] <= start}
    newest = {_step_of(folder): folder for folder in sorted(complete) if _step_of(folder) <= step}
    kept = {step for step in newest if step in best or (every and step % every == 0)}
    kept |= set(sorted(newest)[-last:])
    folders = {name.rpartition("/")[0] for name in names if name.count("/") == 3}
    unfinished = {folder for folder in folders - complete if folder.rpartition("/")[2] <= start}
    next_ones = {folder for folder in folders if folder.rpartition("/")[2] == start and _step_of(folder) > step}
    return sorted((unfinished | complete) - next_ones - {newest[step] for step in kept})


def best_steps(metrics: Mapping[int, float], count: int) -> list[int]:
    """Return the `count` steps with the lowest metric, the best first; of equal ones the newest. A metric that is not
    finite is none: NaN has no order, so a list with one is not sorted."""
    finite = (step for step, value in metrics.items() if math.isfinite(value))
    return sorted(finite, key=lambda step: (metrics[step], -step))[:count]


def _step_of(folder: str) -> int:
    return int(folder.split("/")[1].removeprefix("step-"))
