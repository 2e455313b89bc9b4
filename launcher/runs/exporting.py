"""Export a checkpoint of a run, and convert the trainer's errors to launch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from launch_train.common.storage import Storage
from launch_train.common.storage import UnreachableError as FolderUnreachable
from launch_train.export import FORMATS, Exported, Format, OutputError, TrainError, export, find_checkpoint
from launch_train.export import UsageError as TrainUsageError
from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.gcp.api import status_of


def export_checkpoint(
    run: str,
    folder: Storage,
    kind: Format,
    target: str | None,
    *,
    step: int | Literal["best"] | None = None,
    weights_only: bool = False,
    tokenizer: str | None = None,
    say: Callable[[str], None],
) -> Exported:
    """Export a checkpoint of a run to `target` (default: a folder here, named after it). Raises LaunchError."""
    if kind not in FORMATS:
        raise UsageError(f"invalid format {kind!r}", f"Use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}.")
    if find_spec("torch") is None:
        raise LaunchError("launch export needs PyTorch, which is not installed here", 'pip install "gcp-launch[train]"')
    with train_errors():
        manifest = find_checkpoint(folder, step)
        where = target or str(Path(f"{run}-step-{manifest.step}-{kind}").absolute())
        return export(folder, manifest, kind, where, weights_only=weights_only, tokenizer=tokenizer, say=say)


@contextmanager
def train_errors() -> Iterator[None]:
    """Raise launch's own errors for those of the trainer and the storage."""
    try:
        yield
    except FolderUnreachable as error:
        raise UnreachableError(str(error), "Try again in a moment.") from error
    except OutputError as error:
        problem, _, command = str(error).partition(": gcloud ")
        denied = status_of(error) in (401, 403) or type(error.__cause__).__module__.startswith("google.auth")
        raise (NotAuthorised if denied else LaunchError)(problem, f"gcloud {command}" if command else "") from error
    except TrainError as error:
        problem, _, fix = str(error).partition("; use ")
        kind = UsageError if isinstance(error, TrainUsageError) else LaunchError
        raise kind(problem, f"Use {fix}." if fix else "") from error
