"""Resume from the newest valid checkpoint, on all ranks alike, or refuse one that belongs to another run."""

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

from launch_train.checkpointing import lease as leases
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing.lease import Lease
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.checkpointing.partition import State, join
from launch_train.common import contract
from launch_train.common.config import CHANGEABLE, default_warmup
from launch_train.common.errors import OutputError, UsageError
from launch_train.common.storage import Storage
from launch_train.distributed import dtensor
from launch_train.distributed.process_group import Ranks, gather, run_on_all, run_on_rank_0, run_once_per_node

PATIENT_SECONDS = 900.0
"""Time limit of each request while a run resumes: nothing else can be done than wait for the bucket."""

FIXED = ("model", "steps", "batch_size", "optimizer", "seed")
"""Settings of run.config that can't change within a run, except that `steps` may grow; the data can't change either."""


class Resumed(NamedTuple):
    """A checkpoint: its manifest, and the shards of all ranks as they were saved."""

    manifest: Manifest
    shards: Sequence[Mapping[str, Any]]

    def shared_state(self, like: Callable[[str], Tensor | None]) -> State:
        """Return the state that all ranks share; of sharded tensors only this rank's parts, and no more of them is
        read.

        `like` returns the tensor of this run whose sharding a path takes, or None (see trainer.resume.state_layout).
        """
        # Copies: the optimizer keeps these tensors, and would keep the file open.
        tensors = {
            path: dtensor.load_like(like(path), saved) for path, saved in dtensor.saved_tensors(self.shards).items()
        }
        state: State = join(tensors, self.shards[0]["rest"])
        return state

    def own(self, ranks: Ranks) -> State | None:
        """Return this rank's own state; None if the number of ranks has changed."""
        return dict(self.shards[ranks.rank]["own"]) if len(self.shards) == ranks.world else None


class Claim(NamedTuple):
    """The lease of this start. `lease` is None on all ranks but 0: it can't be sent to the others."""

    start: str
    lease: Lease | None


def take_over(ranks: Ranks, storage: Storage, about: Mapping[str, Any], env: Mapping[str, str]) -> Claim:
    """Take over the run folder from older starts, which then exit; but first check that it belongs to this run.

    Raises, on all ranks alike, UsageError (it belongs to another spec), SupersededError and OutputError.
    """
    patient = storage.within(PATIENT_SECONDS)
    mine: list[Lease] = []

    def take() -> str:
        if manifest := newest_manifest(patient):
            require_same_run(manifest.about, about, patient.url)
        mine.append(leases.acquire(patient, env))
        return mine[0].start

    start = run_on_rank_0(ranks, take)
    return Claim(start, mine[0] if mine else None)


def newest_manifest(storage: Storage) -> Manifest | None:
    """Return the newest readable manifest, or None."""
    for name in manifests.manifest_names(storage):
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
    """Pass the newest usable checkpoint to `use`, on every rank, and return its manifest; None if there is none.

    `about` describes this run, as in a manifest. A broken checkpoint is reported and skipped. The shards are on the
    local disk, in `scratch`, until `use` returns.

    Raises, on all ranks alike: UsageError if the checkpoints are those of another spec or another version, OutputError
    if the storage can't be read, and a TrainError that `use` raises on one of them.
    """
    patient = storage.within(PATIENT_SECONDS)
    names = run_on_rank_0(ranks, lambda: manifests.manifest_names(patient))
    for name in names:
        fetched = run_once_per_node(ranks, partial(_fetch, patient, name, about, scratch))
        try:
            resumed, reason = None, fetched.reason
            if fetched.manifest:
                try:
                    saved = manifests.read_all(fetched.manifest.folder, fetched.paths)
                    resumed = Resumed(fetched.manifest, saved)
                except CheckpointError as error:
                    reason = str(error)
            bad = next(filter(None, gather(ranks, reason)), "")
            if resumed and not bad:
                run_on_all(ranks, partial(use, resumed))
                return resumed.manifest
            if ranks.rank == 0:
                print(f"skipped a checkpoint: {bad}", flush=True)
        finally:  # all ranks of this node get here: each has read what it needs
            shutil.rmtree(fetched.folder, ignore_errors=True)
    if names and ranks.rank == 0:
        print("no usable checkpoint: starting from step 1", flush=True)
    return None


def scratch_folder(env: Mapping[str, str]) -> Path | None:
    """Return the folder for downloaded checkpoints: the node removes it, whatever happens to this process."""
    folder = Path(env.get(contract.NOTICE) or "/nonexistent/notice").parent
    return folder if folder.is_dir() else None


class _Fetched(NamedTuple):
    """A checkpoint on the local disk, or the reason why it is unusable."""

    folder: Path
    manifest: Manifest | None = None
    paths: Sequence[Path] = ()
    reason: str = ""


def _fetch(storage: Storage, name: str, about: Mapping[str, Any], scratch: Path | None) -> _Fetched:
    folder = Path(tempfile.mkdtemp(prefix="launch-checkpoint-", dir=scratch))
    try:
        manifest = manifests.read(storage, name)
        require_same_run(manifest.about, about, storage.url)
        return _Fetched(folder, manifest, manifests.fetch(storage, manifest, folder))
    except CheckpointError as error:
        return _Fetched(folder, reason=str(error))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        problem = f"{name} can't be stored in {folder.parent}: {error.strerror or error}"
        raise OutputError(f"{problem}. Set TMPDIR to a folder on another disk") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def require_same_run(theirs: Mapping[str, Any], ours: Mapping[str, Any], url: str) -> None:
    """Raise UsageError if a checkpoint belongs to another run."""
    config = theirs.get("config")
    if not isinstance(config, Mapping) or not {*FIXED, "data"} <= config.keys():
        raise UsageError(f"{url} contains checkpoints of another program; use another output or another name")
    before, now = _fixed_settings(theirs["config"]), _fixed_settings(json.loads(json.dumps(ours["config"])))
    if isinstance(before["steps"], int) and isinstance(now["steps"], int) and now["steps"] > before["steps"]:
        optimizer = dict(before["optimizer"])  # the default warm-up depends on the end
        if all(each["optimizer"]["warmup_steps"] == default_warmup(each["steps"]) for each in (before, now)):
            optimizer["warmup_steps"] = now["optimizer"]["warmup_steps"]
        before = {**before, "steps": now["steps"], "optimizer": optimizer}
    changed = [
        f"{key} was {_format_value(before[key])} and is {_format_value(now[key])}"
        for key in FIXED
        if before[key] != now[key]
    ]
    if before.get("init_from") != now.get("init_from"):
        changed.append(
            f"init_from was {_format_value(before.get('init_from'))} and is {_format_value(now['init_from'])}"
        )
    if theirs.get("data_sha256") != ours.get("data_sha256"):
        changed.append(f"the data was {theirs.get('data')} with other content")
    elif not ours.get("data_sha256") and _set(before["data"]) != _set(now["data"]):
        changed.append(f"data was {before['data']} and is {now['data']}")
    if changed:
        raise UsageError(
            f"{url} belongs to another spec: {'; '.join(changed)}. "
            "Change it back to resume, or start a fresh run (--new, or another name)"
        )


def describe_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describe the changed settings that leave the steps so far as they are: `steps: 300 before, 600 now`."""
    before, now = theirs.get("config", {}), json.loads(json.dumps(ours["config"]))
    if not isinstance(now.get("steps"), int):
        return []
    lines = []
    for key in ("steps", *CHANGEABLE):
        if key in before and before[key] != now[key]:
            lines.append(f"{key}: {_format_value(before[key])} before, {_format_value(now[key])} now")
    optimizer = now["optimizer"]
    if before.get("steps") != now["steps"] and optimizer["min_lr"] != optimizer["lr"]:
        lines[0] += "; the learning rate follows the new end from here on"
    return lines


def _fixed_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without `optimizer.fused`, which only selects kernels. A custom script has no such
    settings."""
    optimizer = config["optimizer"]
    if not isinstance(optimizer, Mapping):
        return dict(config)
    return {**config, "optimizer": {key: item for key, item in optimizer.items() if key != "fused"}}


def _set(data: Any) -> Any:
    """Return the data's settings without unset ones: a checkpoint of the commit before may lack a new setting."""
    return {key: item for key, item in data.items() if item is not None} if isinstance(data, Mapping) else data


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}"
    return str(value)


def describe_changes(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Describe changes that are allowed within a run, but change its losses in the last digits."""
    names = {"world_size": "ranks", "micro_batch": "samples in a micro-batch", "precision": "precision"}
    names |= {"device": "device", "torch": "torch", "compiled": "torch.compile", "parallel": "parallel"}
    names |= {"attention": "attention", "fused": "optimizer.fused"}
    before, now = _environment(theirs), _environment(ours)
    return [
        f"{label}: {before[key]} before, {now[key]} now"
        for key, label in names.items()
        if key in before and before[key] != now[key]
    ]


def _environment(about: Mapping[str, Any]) -> dict[str, Any]:
    config = about.get("config", {})
    optimizer = config.get("optimizer")
    fused = optimizer.get("fused") if isinstance(optimizer, Mapping) else None
    settings = {key: config[key] for key in ("parallel", "attention") if key in config}
    return {**about, **settings, "fused": "auto" if fused is None else str(fused).lower()}
