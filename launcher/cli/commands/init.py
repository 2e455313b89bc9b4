"""`launch init`: write a starter spec."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from launcher.errors import UsageError


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented starter spec."""
    from launcher.cli.flows.suggestions import in_project, program
    from launcher.spec.starter import starter

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(starter())
    except FileExistsError:
        raise UsageError(
            f"{path} already exists", "launch init does not overwrite files; choose another name."
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    name = shlex.quote(path.as_posix())
    print(f"Wrote {path}. Next:")
    print(f"  {program()} local {name} --gpus 2      # runs the job on this machine")
    print(f"  {in_project(f'{program()} vertex {name} --dry-run')}    # shows the plan and its cost")
