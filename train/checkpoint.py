"""Checkpoints: numbered parts with sizes and digests in a manifest, which is written last and makes them valid.

A script of your own saves and goes on in a few lines, under torchrun or not; without a run folder they do nothing:

    from train import checkpoint
    state = {"model": model, "optimizer": optimizer}
    for step in range(checkpoint.restore(state) + 1, steps + 1):
        ...
        if checkpoint.due(step):
            checkpoint.save(step, state)
        if checkpoint.preempted():
            checkpoint.leave()

A step's folder has a sub-folder for each start of the run that saved it, so that two never mix:

    checkpoints/step-00000300/0001-0002/rank-00000-0000.part …    what rank 0 saved: a torch.save file, in pieces
    checkpoints/step-00000300/0001-0002/manifest.json             sizes and digests; there once everything else is

`torch.load` notices a lost byte but no flipped one, so a reader checks the digests first and trusts manifests only.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from train import contract
from train.config import Checkpoint as Settings
from train.cutter import WORKERS, Part
from train.errors import TrainError, UsageError
from train.storage import Storage, open_storage
from train.storage.sources import checksum

FORMAT = 1
"""Counts up when an older launch could not read what is written."""

OLD_MANIFEST = "/manifest.json"


class CheckpointError(TrainError):
    """A checkpoint that is not there, or is not what its manifest says."""


class Manifest(NamedTuple):
    """What makes a checkpoint: `shards` has each rank's parts in their order, `about` what the run said of itself."""

    step: int
    start: str
    shards: tuple[tuple[Part, ...], ...]
    about: dict[str, Any]

    @property
    def folder(self) -> str:
        return contract.checkpoint_folder(self.step, self.start)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for shard in self.shards for part in shard)


# --- Writing --------------------------------------------------------------------------------------------------------


def commit(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint valid: all of its parts are there. Raises FileExistsError if another one is in its place."""
    name = contract.manifest(manifest.step, manifest.start)
    storage.write(name, encoded(manifest), create=True)


def encoded(manifest: Manifest) -> bytes:
    """As JSON, the digest of all the rest in the last line: a manifest too may be damaged."""
    shards = [[part._asdict() for part in shard] for shard in manifest.shards]
    data = {"format": FORMAT, "step": manifest.step, "start": manifest.start, "shards": shards, "about": manifest.about}
    return json.dumps({**data, "sha256": _digest(data)}, indent=1).encode()


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


# --- Reading --------------------------------------------------------------------------------------------------------


def manifests(names: Iterable[str]) -> list[str]:
    """The manifests among the names of a run folder, the newest step and start first.

    Raises UsageError if there are checkpoints of a version before manifests had a start.
    """
    found = [(match["step"], match["start"], name) for name in names if (match := contract.MANIFEST.match(name))]
    if not found and (old := [name for name in names if name.endswith(OLD_MANIFEST)]):
        raise UsageError(_other_version(old[0], 0))
    return [name for _, _, name in sorted(found, reverse=True)]


def _other_version(name: str, version: object) -> str:
    return (
        f"{name} was written by another version of launch (format {version}, this one reads {FORMAT}): "
        "go on with that version, or begin a new run (--new)"
    )


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Raises CheckpointError if it is damaged or isn't there, and UsageError if another version wrote it."""
    try:
        data = json.loads(storage.read(name))
        digest = data.pop("sha256")
        whole = digest == _digest(data)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is gone") from error
    if not whole:
        raise CheckpointError(f"{name} is damaged: its digest is not that of its content")
    if data["format"] != FORMAT:
        raise UsageError(_other_version(name, data["format"]))
    shards = tuple(tuple(Part(**part) for part in shard) for shard in data["shards"])
    manifest = Manifest(data["step"], data["start"], shards, data["about"])
    if name != contract.manifest(manifest.step, manifest.start):
        raise CheckpointError(f"{name} is that of another checkpoint ({manifest.folder})")
    return manifest


def fetch(storage: Storage, manifest: Manifest, folder: Path) -> list[Path]:
    """Bring a checkpoint's shards to local files, each part checked, several at once.

    Raises CheckpointError if a part is missing or damaged, and OutputError if the storage can't be read.
    """
    paths = [folder / f"rank-{rank:05d}.pt" for rank in range(len(manifest.shards))]
    jobs = []
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="checkpoint") as pool:
        for path, shard in zip(paths, manifest.shards, strict=True):
            path.touch()
            offset = 0
            for part in shard:
                jobs.append(pool.submit(_fetch_part, storage, manifest.folder, part, path, offset))
                offset += part.bytes
        for job in jobs:
            job.result()
    return paths


def _fetch_part(storage: Storage, folder: str, part: Part, path: Path, offset: int) -> None:
    try:
        data = storage.read(f"{folder}/{part.name}")
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}/{part.name} is missing") from error
    if len(data) != part.bytes or checksum(data) != part.crc32c:
        raise CheckpointError(f"{folder}/{part.name} is damaged: size or CRC32C is not the manifest's")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def read_shard(path: Path) -> dict[str, Any]:
    """What one rank saved, its tensors mapped from the file. No pickled code is ever run."""
    import torch

    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content


def load(url: str, step: int | None = None) -> dict[str, Any]:
    """A checkpoint's whole state for a program of your own: `load(RUN_FOLDER)["model"]` is the model's state_dict, and
    `["ranks"]` has what was each rank's own.

    The newest valid one, or that of `step`. Raises CheckpointError if there is none, or what it has is damaged.
    """
    from train.pieces import wholes
    from train.plain import decoded
    from train.state import joined

    storage = open_storage(url)
    wanted = [name for name in manifests(storage.list(f"{contract.CHECKPOINTS}/")) if _is_of(name, step)]
    reasons = [] if wanted else ["there is none"]
    for name in wanted:
        try:
            with tempfile.TemporaryDirectory(prefix="launch-checkpoint-") as folder:
                paths = fetch(storage, read_manifest(storage, name), Path(folder))
                shards = [read_shard(path) for path in paths]
                tensors = wholes(shards)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            state: dict[str, Any] = decoded(joined(tensors, shards[0]["rest"]))
            return state | {"ranks": [shard["own"] for shard in shards]}
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise CheckpointError(f"{storage.url} has no usable {which}: {'; '.join(reasons)}")


def _is_of(name: str, step: int | None) -> bool:
    match = contract.MANIFEST.match(name)
    return step is None or (match is not None and int(match["step"]) == step)


# --- Keeping --------------------------------------------------------------------------------------------------------


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


# --- For a script of your own (train.script does the work) ----------------------------------------------------------


def restore(
    state: MutableMapping[str, Any],
    *,
    own: MutableMapping[str, Any] | None = None,
    minutes: float | Literal["auto", "off"] = "auto",
    keep_last: int = 3,
    keep_every: int = 0,
) -> int:
    """Bring `state` and the random generators to the run's newest checkpoint. Returns its step: 0 in a new run.

    What has `state_dict` and `load_state_dict` is changed in place, inside DDP and torch.compile; any other value
    (numbers, text, bytes, tensors, NumPy arrays, lists and dicts of them) is put into `state`. That is the same on all
    ranks; `own` is what each rank has for itself, and stays as it is if the run had another number of ranks.
    `minutes`, `keep_last` and `keep_every` are as in run.config's `checkpoint`. Call it once, on all ranks, last before
    the loop. Without a run folder it does nothing.

    A state that doesn't fit the checkpoint, a run that was taken over and a run folder that can't be used end the
    process in one line, with their exit codes.
    """
    if not os.environ.get(contract.RUN_FOLDER):
        return 0
    from train import script

    step: int = script.restore(state, {} if own is None else own, Settings(minutes, keep_last, keep_every))
    return step


def due(step: int) -> bool:
    """Whether to save now: the interval is over, or the machine is to go. All ranks call it after the same steps, and
    are told the same."""
    if not os.environ.get(contract.RUN_FOLDER):
        return False
    from train import script

    now: bool = script.due(operator.index(step))
    return now


def save(step: int, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, wait: bool = False) -> None:
    """Save `state`, and each rank's `own`, as they are after `step`, on all ranks. The values are copied now and
    written by a thread; with `wait`, and once the machine is to go, it returns when they are durable.

    Raises TypeError for a value that a checkpoint can't hold, and ValueError for a step behind the newest.
    """
    if not os.environ.get(contract.RUN_FOLDER):
        return
    from train import script

    script.save(operator.index(step), state, own or {}, wait=wait)


def preempted() -> bool:
    """Whether the last `due` said that the machine is to go: the same on all ranks."""
    if not os.environ.get(contract.RUN_FOLDER):
        return False
    from train import script

    return script.preempted()


def leave() -> NoReturn:
    """End this process as preempted (exit code 75): another start goes on from what was saved."""
    from train import script

    script.go()
