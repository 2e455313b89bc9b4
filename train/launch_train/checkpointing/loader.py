"""Going on from the newest checkpoint that is whole, on all ranks alike; or refusing to, in words."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from launch_train.checkpointing import lease as fence
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import reader as shards
from launch_train.checkpointing.lease import Fence
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.checkpointing.partition import State, joined
from launch_train.common import contract
from launch_train.common.errors import OutputError, UsageError
from launch_train.common.storage import Storage
from launch_train.distributed import dtensor
from launch_train.distributed.process_group import Ranks, gather, on_all, on_first, once_per_node

PATIENT_SECONDS = 900.0
"""For each request while a run resumes: there is nothing else to do than to wait for the bucket."""

FIXED = ("model", "steps", "batch_size", "optimizer", "seed")
"""Settings of run.config that can't change within a run, beside the data."""


class Resumed(NamedTuple):
    """What was found: the manifest, and the shards of all ranks as they were saved."""

    manifest: Manifest
    shards: Sequence[Mapping[str, Any]]

    def laid_out(self, like: Callable[[str], Tensor | None]) -> State:
        """The state that all ranks have alike; of what is shared out among them only this rank's parts: no more of them
        is read. `like` says of a tensor's path as which one it is to be shared out (as state.layout)."""
        # Copies: the optimizer keeps what it is given, and would keep the file with it.
        tensors = {path: dtensor.like(like(path), saved) for path, saved in dtensor.stored(self.shards).items()}
        state: State = joined(tensors, self.shards[0]["rest"])
        return state

    def own(self, ranks: Ranks) -> State | None:
        """This rank's own state; None if the run had another number of ranks."""
        return dict(self.shards[ranks.rank]["own"]) if len(self.shards) == ranks.world else None


class Claim(NamedTuple):
    """This start's right to the run folder. `fence` is rank 0's alone: it can't travel to the others."""

    start: str
    fence: Fence | None


def take_over(ranks: Ranks, storage: Storage, about: Mapping[str, Any], env: Mapping[str, str]) -> Claim:
    """Take the run folder over from older starts, which end; but first see that it is a folder of this run.

    Raises, on all ranks alike, UsageError (it belongs to another spec), SupersededError and OutputError.
    """
    patient = storage.within(PATIENT_SECONDS)
    mine: list[Fence] = []

    def take() -> str:
        look_first(patient, about)
        mine.append(fence.taken(patient, env))
        return mine[0].start

    start = on_first(ranks, take)
    return Claim(start, mine[0] if mine else None)


def look_first(storage: Storage, about: Mapping[str, Any]) -> None:
    """Raise UsageError if the run folder belongs to another spec, going by the newest manifest that can be read."""
    if manifest := newest(storage):
        refuse_another(manifest.about, about, storage.url)


def newest(storage: Storage) -> Manifest | None:
    """The newest manifest that can be read; None: there is none."""
    for name in manifests.listed(storage.list(f"{contract.CHECKPOINTS}/")):
        with suppress(CheckpointError):
            return manifests.read(storage, name)
    return None


def resume(
    ranks: Ranks,
    storage: Storage,
    about: Mapping[str, Any],
    use: Callable[[Resumed], None],
    scratch: Path | None = None,
) -> Manifest | None:
    """Give the newest usable checkpoint to `use`, on every rank, and return its manifest; None if there is none.

    `about` is what this run says of itself. A broken checkpoint is told and passed over. The shards are on this node's
    disk, in `scratch`, until `use` returns.

    Raises, on all ranks alike: UsageError if the checkpoints are those of another spec or another version, OutputError
    if the storage can't be read, and what `use` raises of ours on one of them.
    """
    patient = storage.within(PATIENT_SECONDS)
    names = on_first(ranks, lambda: manifests.listed(patient.list(f"{contract.CHECKPOINTS}/")))
    for name in names:
        fetched = once_per_node(ranks, partial(_fetch, patient, name, about, scratch))
        try:
            found, reason = _read(fetched)
            bad = next(filter(None, gather(ranks, reason)), "")
            if found and not bad:
                on_all(ranks, partial(use, found))
                return found.manifest
            if ranks.rank == 0:
                print(f"a checkpoint is passed over: {bad}", flush=True)
        finally:  # on the ranks of this node alike: each has read what it needs
            shutil.rmtree(fetched.folder, ignore_errors=True)
    if names and ranks.rank == 0:
        print("no checkpoint can be used: the run begins at step 1 again", flush=True)
    return None


def scratch(env: Mapping[str, str]) -> Path | None:
    """Where a checkpoint is unpacked: a folder that the node removes, whatever happens to this process."""
    return Path(env[contract.NOTICE]).parent if env.get(contract.NOTICE) else None


class _Fetched(NamedTuple):
    """A checkpoint on this node's disk, or why it can't be used."""

    folder: Path
    manifest: Manifest | None = None
    paths: Sequence[Path] = ()
    reason: str = ""


def _fetch(storage: Storage, name: str, about: Mapping[str, Any], scratch: Path | None) -> _Fetched:
    inside = scratch if scratch and scratch.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="launch-checkpoint-", dir=inside))
    try:
        manifest = manifests.read(storage, name)
        refuse_another(manifest.about, about, storage.url)
        return _Fetched(folder, manifest, shards.fetch(storage, manifest, folder))
    except CheckpointError as error:
        return _Fetched(folder, reason=str(error))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        where = f"{name} doesn't get into {folder.parent}: {error.strerror or error}"
        raise OutputError(f"{where}. TMPDIR names another disk") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _read(fetched: _Fetched) -> tuple[Resumed | None, str]:
    """What was fetched, or why it can't be used."""
    if fetched.manifest is None:
        return None, fetched.reason
    try:
        return Resumed(fetched.manifest, shards.read_all(fetched.manifest.folder, fetched.paths)), ""
    except CheckpointError as error:
        return None, str(error)


def refuse_another(theirs: Mapping[str, Any], ours: Mapping[str, Any], url: str) -> None:
    """Raise UsageError if a checkpoint's run isn't ours: going on from it would be neither run."""
    config = theirs.get("config")
    if not isinstance(config, Mapping) or not {*FIXED, "data"} <= config.keys():
        raise UsageError(f"{url} contains checkpoints of another program. Set another output or another name")
    before, now = _fixed(theirs["config"]), _fixed(json.loads(json.dumps(ours["config"])))
    changed = [f"{key} was {_short(before[key])} and is {_short(now[key])}" for key in FIXED if before[key] != now[key]]
    if theirs.get("data_sha256") != ours.get("data_sha256"):
        changed.append(f"the data was {theirs.get('data')} with another content")
    elif not ours.get("data_sha256") and before["data"] != now["data"]:
        changed.append(f"data was {before['data']} and is {now['data']}")
    if changed:
        raise UsageError(
            f"{url} belongs to another spec: {'; '.join(changed)}. "
            "Set it back to go on, or begin a new run (--new, or another name)"
        )


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what only says by which kernels the optimizer works. A script of the user's own has no such settings."""
    optimizer = config["optimizer"]
    if not isinstance(optimizer, Mapping):
        return dict(config)
    return {**config, "optimizer": {key: item for key, item in optimizer.items() if key != "fused"}}


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


def changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What may change within a run but makes its losses differ in their last digits, in words."""
    names = {"world_size": "ranks", "micro_batch": "samples in a micro-batch", "precision": "precision"}
    names |= {"device": "device", "torch": "torch", "compiled": "torch.compile", "parallel": "parallel"}
    names |= {"attention": "attention", "fused": "optimizer.fused"}
    before, now = _said(theirs), _said(ours)
    return [
        f"{words}: {before[key]} before, {now[key]} now"
        for key, words in names.items()
        if key in before and before[key] != now[key]
    ]


def _said(about: Mapping[str, Any]) -> dict[str, Any]:
    config = about.get("config", {})
    optimizer = config.get("optimizer")
    fused = optimizer.get("fused") if isinstance(optimizer, Mapping) else None
    found = {"parallel": config.get("parallel", "ddp"), "attention": config.get("attention", "auto")}
    return {**about, **found, "fused": "auto" if fused is None else str(fused).lower()}
