"""Which checkpoints a run keeps; the others go, and so does what was left unfinished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from launch_train.checkpointing.multipart_writer import WORKERS
from launch_train.common import contract
from launch_train.common.storage import Storage


def prune(
    storage: Storage, step: int, start: str, *, last: int, every: int, give_up: Callable[[], bool] = lambda: False
) -> list[str]:
    """After `start` has saved `step`: remove what `keep` doesn't name. Of the steps up to this one the `last` newest
    stay, and the multiples of `every` (0: none). Steps beyond it are of a checkpoint that was passed over as broken:
    they go, and so does what was left unfinished. Returns the folders that went. The manifest goes first."""
    names = storage.list(f"{contract.CHECKPOINTS}/")
    doomed = expendable(names, step, start, last=last, every=every)

    def delete(name: str) -> None:
        if not give_up():
            storage.delete(name)

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint") as pool:
        for folder in doomed:
            delete(f"{folder}/manifest.json")
            parts = [name for name in names if name.startswith(f"{folder}/") and not name.endswith("/manifest.json")]
            list(pool.map(delete, parts))
    return doomed


def expendable(names: Sequence[str], step: int, start: str, *, last: int, every: int) -> list[str]:
    """The folders, of one start and step each, that `prune` removes. Pure."""
    whole = {name.rpartition("/")[0] for name in names if contract.MANIFEST.match(name)}
    whole = {folder for folder in whole if folder.rpartition("/")[2] <= start}
    newest: dict[int, str] = {}
    for folder in sorted(folder for folder in whole if _step(folder) <= step):
        newest[_step(folder)] = folder
    kept = {step for step in newest if every and step % every == 0} | set(sorted(newest)[-last:])
    folders = {name.rpartition("/")[0] for name in names if name.count("/") == 3}
    unfinished = {folder for folder in folders - whole if folder.rpartition("/")[2] <= start}
    return sorted(unfinished | (whole - {newest[step] for step in kept}))


def _step(folder: str) -> int:
    return int(folder.split("/")[1].removeprefix("step-"))


def discard(storage: Storage, folder: str, give_up: Callable[[], bool] = lambda: False) -> None:
    """Remove the parts of a save that failed: they would fill the disk, or be billed."""
    for name in storage.list(f"{folder}/"):
        if give_up():
            return
        storage.delete(name)
