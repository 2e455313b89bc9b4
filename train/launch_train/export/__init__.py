"""Export a checkpoint in a format that other programs load: safetensors, Hugging Face, torch or DCP.

Tensors are mapped from files and written one after the other, so the host holds no copy of the model; the disk holds
two: the downloaded checkpoint (in TMPDIR) and the result. torch is imported by `export` only.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from launch_train import runfolder
from launch_train.checkpointing import manifest as manifests
from launch_train.checkpointing import retention
from launch_train.checkpointing.manifest import CheckpointError, Manifest
from launch_train.common.errors import OutputError, TrainError, UsageError
from launch_train.common.scratch import temporary_folder
from launch_train.common.storage import LocalFolder, Storage, open_storage
from launch_train.common.storage.local import explain_disk_error
from launch_train.export import tokenizer as tokenizers

if TYPE_CHECKING:
    from launch_train.export.formats import Writer

__all__ = ["FORMATS", "Exported", "OutputError", "TrainError", "UsageError", "export", "find_checkpoint"]

Format = Literal["safetensors", "hf", "torch", "dcp"]
FORMATS: Final = ("safetensors", "hf", "torch", "dcp")

CONFIG: Final = "config.json"
"""For hf the model's config as transformers reads it, otherwise run.config and the checkpoint's facts."""

METRIC: Final = "eval_loss"

MOST_STEPS: Final = 10
"""Most steps that an error lists."""


class Exported(NamedTuple):
    """A finished export: its folder, the size of each file in bytes, and a line about each thing that was left out."""

    url: str
    files: dict[str, int]
    notes: tuple[str, ...]


def find_checkpoint(storage: Storage, step: int | Literal["best"] | None = None) -> Manifest:
    """Return the manifest of the newest checkpoint, that of `step`, or the one with the lowest held-out loss (best).

    Raises CheckpointError: there is none (the text names the steps that exist), or it is damaged.
    """
    names = manifests.manifest_names(storage)
    if not names:
        raise CheckpointError(f"{storage.url} has no checkpoint yet; use a run that has saved one")
    if step == "best":
        best = retention.best_steps(manifests.metrics(storage, METRIC), 1)
        if not best:
            raise CheckpointError(f"{storage.url} has no checkpoint with an {METRIC}; set checkpoint.keep.best")
        (step,) = best
    matches = {name: runfolder.MANIFEST.match(name) for name in names}
    steps_by_name = {name: int(match["step"]) if match else 0 for name, match in matches.items()}
    for name in names:
        if step is None or steps_by_name[name] == step:
            return manifests.read(storage, name)
    steps = sorted({*steps_by_name.values()})
    more = f" and {len(steps) - MOST_STEPS} older ones" if len(steps) > MOST_STEPS else ""
    known = ", ".join(map(str, steps[-MOST_STEPS:]))
    raise CheckpointError(f"{storage.url} has no checkpoint of step {step}; it has {known}{more}")


def export(
    storage: Storage,
    manifest: Manifest,
    kind: Format,
    target: str,
    *,
    weights_only: bool = False,
    tokenizer: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Exported:
    """Write the checkpoint to the folder `target` (local or gs://…), which must be empty or not exist.

    A local folder appears when it is complete. `weights_only` leaves out the optimizer's state (hf, dcp). `tokenizer`
    is a tokenizer.json (local or gs://…) to write beside the weights. The checkpoint is data that others may have
    written: it is not obeyed, only read.

    Raises UsageError (the folder is not empty, a package is missing, the model has no such format), CheckpointError
    (the checkpoint is damaged) and OutputError (storage, full disk).
    """
    out = open_storage(target)
    if existing := out.list(""):
        raise UsageError(f"{out.url} is not empty ({existing[0]}); choose a new folder")
    with _damage_as_error(manifest):
        write, notes = _writer(kind, manifest.about, weights_only), [*tokenizers.missing(manifest.about, tokenizer)]
        content = tokenizers.read(tokenizer) if tokenizer else tokenizers.of_run(manifest.about)
    facts = json.dumps({"run_folder": storage.url, "step": manifest.step, **manifest.about}, indent=2)
    with _staging(out, facts) as folder, temporary_folder("export") as scratch:
        if kind != "hf":
            (folder / CONFIG).write_text(facts)
        say(f"reading the checkpoint of step {manifest.step}, {manifest.bytes / 1e6:,.1f} MB")
        with _damage_as_error(manifest, Path(scratch), folder):
            shards = manifests.read_all(manifest.folder, manifests.fetch(storage, manifest, Path(scratch)))
            notes += write(manifest, shards, Path(scratch), folder)
            for name, text in content.items():
                (folder / name).write_bytes(text)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        if not isinstance(out, LocalFolder):
            for name, size in files.items():
                say(f"uploading {name}, {size / 1e6:,.1f} MB")
                out.write_file(name, folder / name)
    return Exported(out.url, files, tuple(notes))


def _writer(kind: Format, about: Mapping[str, Any], weights_only: bool) -> Writer:
    """Return what writes a format. Raises UsageError if a package is missing, or the model has no such format."""
    for package in NEEDS.get(kind, ()):
        if find_spec(package) is None:
            fix = "'gcp-launch[hf]'" if package == "transformers" else package
            raise UsageError(f"--format {kind} needs {package}, which is not installed here: pip install {fix}")
    if kind == "hf":
        from launch_train.export import hugging_face

        return hugging_face.prepare(about, weights_only=weights_only)
    from launch_train.export import formats

    return formats.prepare(kind, about, weights_only=weights_only)


NEEDS: Final = {"safetensors": ("safetensors",), "hf": ("safetensors", "transformers")}
"""Packages that a format needs besides torch."""


@contextmanager
def _staging(out: Storage, facts: str) -> Iterator[Path]:
    """Yield an empty folder on the disk. A local target is that folder, renamed when it is complete; from a bucket
    everything is removed again if the export fails."""
    if isinstance(out, LocalFolder):
        target = out.folder
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except OSError as error:
            raise OutputError(f"{target} can't be written: {explain_disk_error(error, target)}") from error
        try:
            yield folder
            folder.chmod(0o755)
            folder.rename(target)  # replaces an empty folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    out.write(CONFIG, facts.encode())  # before the download: it fails here if nothing may be written
    try:
        with temporary_folder("export") as temporary:
            yield Path(temporary)
    except BaseException:
        with suppress(TrainError):
            for name in out.list(""):
                out.delete(name)
        raise


@contextmanager
def _damage_as_error(manifest: Manifest, *folders: Path) -> Iterator[None]:
    """Raise CheckpointError for content that launch hasn't written, and OutputError if the disk of one of the folders
    is full: torch, safetensors and transformers raise their own errors."""
    try:
        yield
    except (TrainError, MemoryError):
        raise
    except OSError as error:
        if not folders:
            raise
        folder = next((each for each in folders if each in Path(error.filename or "").parents), folders[0])
        raise OutputError(f"{folder} can't be written: {explain_disk_error(error, folder / CONFIG)}") from error
    except Exception as error:
        for folder in folders:
            if shutil.disk_usage(folder).free < NEARLY_FULL:
                full = explain_disk_error(OSError(errno.ENOSPC, ""), folder / CONFIG)
                raise OutputError(f"{folder} can't be written: {full}") from error
        reason = (str(error).splitlines() or [""])[0][:200]
        raise CheckpointError(f"{manifest.folder} can't be exported: {type(error).__name__}: {reason}") from error


NEARLY_FULL: Final = 1 << 20
"""Bytes left on a disk that a failed write has filled."""
