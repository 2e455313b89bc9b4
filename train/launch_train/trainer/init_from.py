"""Start with the weights of another run or model (`init_from`). A checkpoint of this run always wins over them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing.manifest import CheckpointError
from launch_train.checkpointing.partition import REF
from launch_train.checkpointing.resume_loader import PATIENT_SECONDS, scratch_folder
from launch_train.common import contract
from launch_train.common.config import InitFrom, kind_of_weights
from launch_train.common.errors import OutputError, UsageError
from launch_train.common.storage import Storage, open_storage
from launch_train.common.storage.bucket import Objects
from launch_train.common.text import listed, one_line
from launch_train.distributed.dtensor import Region, SavedTensor, load_like, local_part, saved_tensors
from launch_train.distributed.process_group import run_on_all, run_once_per_node
from launch_train.models import hub
from launch_train.trainer.build import Run

TORCH_FILES = (".pt", ".pth", ".bin")
NO_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler")
"""Beginnings of the names of torch files beside the weights, as transformers and `launch export` write them."""
PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that wrappers (DDP, torch.compile, a custom loss) add to names, and others leave out."""
MOST_NAMED = 5
"""Most tensors that a line names."""


class WeightFiles(NamedTuple):
    """Weights on the local disk: files of weights, or the shards of a launch checkpoint (with its folder's name)."""

    source: str
    paths: tuple[Path, ...]
    scratch: Path
    """To be deleted when the weights are loaded."""
    checkpoint: str = ""


class Loaded(NamedTuple):
    """The result of loading weights: the number of tensors, and the names of those left over on either side."""

    loaded: int
    total: int
    missing: tuple[str, ...]
    """Tensors of the model that keep their initial values."""
    unused: tuple[str, ...]
    """Tensors of the source that the model doesn't have."""


def initialize(run: Run, env: Mapping[str, str]) -> None:
    """Load the weights of `init_from` into the model, if it is set, and report what was not loaded.

    Raises, on all ranks alike: UsageError (no such weights, or they don't fit), CheckpointError, OutputError.
    """
    settings = run.config.init_from
    if settings is None:
        return
    weights = run_once_per_node(run.ranks, partial(_find_in_scratch, settings, env))
    source = weights.source
    try:
        report = run_on_all(run.ranks, lambda: load(run.model, read(weights), source, strict=settings.strict))[0]
    finally:  # all ranks of this node get here
        shutil.rmtree(weights.scratch, ignore_errors=True)
    run.facts["init_from"] = {"source": source, **report._asdict()}
    if run.ranks.rank == 0:
        print(f"init_from: loaded {report.loaded} of {report.total} tensors from {source}", flush=True)
        for what, names in (("not loaded", report.missing), ("not used", report.unused)):
            if names:
                print(f"init_from: {what}: {listed(names, MOST_NAMED)}", flush=True)


# --- Find -------------------------------------------------------------------------------------------------------------


def _find_in_scratch(settings: InitFrom, env: Mapping[str, str]) -> WeightFiles:
    scratch = Path(tempfile.mkdtemp(prefix="launch-weights-", dir=scratch_folder(env)))
    try:
        return find(settings, env, scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def find(settings: InitFrom, env: Mapping[str, str], scratch: Path) -> WeightFiles:
    """Return the weights, downloaded to `scratch` if necessary. Raises UsageError, CheckpointError or OutputError."""
    path, kind = settings.path, kind_of_weights(settings.path)
    if kind == "hub":
        return _of_hub(path, scratch)
    if kind == "run":
        beside = env.get(contract.RUN_FOLDER, "").rpartition("/")[0]
        if not beside:
            raise UsageError(f"init_from: {path}: this run has no output, in which it could be; give the run's folder")
        path = f"{beside}/{path}"
    if kind == "local" and not Path(path).expanduser().exists():
        raise UsageError(f"init_from: there is no file or folder {path} here")
    if kind == "local" and Path(path).expanduser().is_file():
        return WeightFiles(path, (_weights_file(Path(path).expanduser()),), scratch)
    storage = open_storage(path).within(PATIENT_SECONDS)
    if manifests.manifest_names(storage):
        return _of_checkpoint(storage, settings.step, scratch)
    if kind == "run":
        raise UsageError(f"init_from: {path} has no checkpoint")
    if kind == "bucket":
        return _of_bucket(path, scratch)
    folder = Path(path).expanduser()
    names = _weights_among([item.name for item in folder.iterdir()], folder)
    return WeightFiles(str(folder), tuple(folder / name for name in names), scratch)


def _of_checkpoint(storage: Storage, step: int | None, scratch: Path) -> WeightFiles:
    """Return the newest valid checkpoint, or that of a step."""
    reasons = []
    for number, name in enumerate(manifests.manifest_names(storage, step)):
        try:
            manifest = manifests.read(storage, name)
            (folder := scratch / str(number)).mkdir()
            paths = manifests.fetch(storage, manifest, folder)
            return WeightFiles(f"{storage.url}, step {manifest.step}", tuple(paths), scratch, manifest.folder)
        except CheckpointError as error:
            reasons.append(str(error))
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise UsageError(f"init_from: {storage.url} has no usable {which}{': ' if reasons else ''}{'; '.join(reasons)}")


def _weights_among(names: list[str], where: object) -> list[str]:
    """Return the files of weights among the names in a folder: safetensors, otherwise torch's. Raises UsageError."""
    weights = [name for name in names if name.endswith(".safetensors")]
    weights = weights or [name for name in names if name.endswith(TORCH_FILES) and not name.startswith(NO_WEIGHTS)]
    if not weights:
        raise UsageError(f"init_from: {where} has neither checkpoints nor *.safetensors, *.pt, *.pth or *.bin")
    return sorted(weights)


def _weights_file(path: Path) -> Path:
    if not path.name.endswith((".safetensors", *TORCH_FILES)):
        raise UsageError(f"init_from: {path} is not a .safetensors, .pt, .pth or .bin file")
    return path


def _of_bucket(url: str, scratch: Path) -> WeightFiles:
    """Download the files of weights in a folder of a bucket, or one file."""
    bucket, _, path = url.removeprefix("gs://").partition("/")
    path = path.strip("/")
    storage = Objects(f"gs://{bucket}")
    objects = {item.name.removeprefix(path).lstrip("/"): item for item in storage.objects(path)}
    if "" in objects:  # the object itself
        wanted = {_weights_file(Path(path)).name: objects[""]}
    else:
        here = [name for name, item in objects.items() if "/" not in name and item.name == f"{path}/{name}"]
        wanted = {name: objects[name] for name in _weights_among(here, url)}
    try:
        for name, item in wanted.items():
            with (scratch / name).open("wb") as file:
                storage.fetch(item, file)
    except FileNotFoundError as error:
        raise OutputError(f"init_from: {url} was changed or deleted while it was read") from error
    return WeightFiles(url, tuple(scratch / name for name in wanted), scratch)


def _of_hub(name: str, scratch: Path) -> WeightFiles:
    """Download a model's weights to the hub's own cache. Raises UsageError: no such model; OutputError."""
    from huggingface_hub import errors, hf_hub_download

    repository = name.removeprefix("hf:")
    get = partial(hf_hub_download, repository, local_files_only=hub.only_cached(repository))

    def get_all(single: str) -> tuple[Path, ...]:
        """Return the files of the index, or the single one."""
        try:
            index = json.loads(Path(get(f"{single}.index.json")).read_text(encoding="utf-8"))
        except errors.EntryNotFoundError:
            return (Path(get(single)),)
        return tuple(Path(get(file)) for file in sorted(set(index["weight_map"].values())))

    for single in ("model.safetensors", "pytorch_model.bin"):
        try:
            return WeightFiles(name, get_all(single), scratch)
        except errors.EntryNotFoundError:
            continue
        except (OSError, errors.HfHubHTTPError) as error:
            raise OutputError(f"init_from: {name} can't be downloaded: {one_line(error)}") from error
    raise UsageError(f"init_from: {name} has neither model.safetensors nor pytorch_model.bin")


# --- Read and load ----------------------------------------------------------------------------------------------------


def read(weights: WeightFiles) -> dict[str, SavedTensor]:
    """Return the tensors by name, mapped from the files. Raises UsageError if a file can't be read."""
    if weights.checkpoint:
        shards = manifests.read_all(weights.checkpoint, weights.paths)
        tensors, model = saved_tensors(shards), shards[0]["rest"].get("model")
        if not isinstance(model, Mapping):
            raise UsageError(f"init_from: the checkpoint in {weights.source} has no `model`")
        refs = {name: entry[REF] for name, entry in model.items() if isinstance(entry, Mapping) and REF in entry}
        return {name: tensors[path] for name, path in refs.items()}
    named: dict[str, Tensor] = {}
    for path in weights.paths:
        named |= _read_file(path)
    return {
        name: SavedTensor(tuple(tensor.shape), ((Region((0,) * tensor.dim(), tuple(tensor.shape)), tensor),))
        for name, tensor in named.items()
    }


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.name.endswith(".safetensors"):
            from safetensors.torch import load_file

            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(f"init_from: {path.name} can't be read: {type(error).__name__}: {reason}") from error
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)} if content else {}
    if not tensors:
        raise UsageError(f"init_from: {path.name} has no tensors by name")
    return tensors


@torch.no_grad()
def load(model: nn.Module, saved: Mapping[str, SavedTensor], source: str, *, strict: bool) -> Loaded:
    """Copy the saved tensors into the model, one at a time; of a sharded one only this rank's part.

    Raises UsageError if nothing fits, or with `strict` if not everything does.
    """
    ours = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    names = match_names(ours, saved)
    fits = {name: theirs for name, theirs in names.items() if tuple(ours[name].shape) == saved[theirs].shape}
    tied = {_identity(ours[name]) for name in fits}
    missing = [name for name in ours if name not in fits and _identity(ours[name]) not in tied]
    unused = [name for name in saved if name not in names.values()]
    shapes = {name: f" (shape {list(ours[name].shape)} here, {list(saved[names[name]].shape)} there)" for name in names}
    report = Loaded(
        len(ours) - len(missing),
        len(ours),
        tuple(f"{name}{shapes.get(name, '')}" for name in missing),
        tuple(unused),
    )
    if not fits or (strict and (missing or unused)):
        sides = (("the model also needs", report.missing), ("it also has", report.unused))
        odd = "; ".join(f"{what}: {listed(names, MOST_NAMED)}" for what, names in sides if names)
        hint = "; strict: false loads what fits" if strict and report.loaded else ""
        raise UsageError(f"init_from: the weights in {source} don't fit the model ({odd}){hint}")
    for name, theirs in fits.items():
        ours[name].copy_(load_like(ours[name], saved[theirs]))
    return report


def match_names(ours: Collection[str], theirs: Collection[str]) -> dict[str, str]:
    """Return their name for each of ours that they have, whatever prefixes of wrappers either has."""
    bare = {_bare(name): name for name in theirs}
    return {
        name: name if name in theirs else bare[_bare(name)] for name in ours if name in theirs or _bare(name) in bare
    }


def _bare(name: str) -> str:
    while prefix := next((prefix for prefix in PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _identity(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return what tied tensors have in common."""
    here = local_part(tensor)
    return (here.data_ptr() if here.numel() else id(tensor)), tensor.shape
