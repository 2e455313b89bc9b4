"""`launch init`: write a starter spec."""

from __future__ import annotations

import shlex
from itertools import count
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
        other = "a file, such as job.yaml" if path.is_dir() else f"another name: launch init {other_name(path)}"
        raise UsageError(f"{path} already exists", f"launch init does not overwrite it. Choose {other}") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "Name a file in a folder that exists.") from error
    name = shlex.quote(path.as_posix())
    print(f"Wrote {path}. Next:")
    print(f"  {program()} local {name} --gpus 2\n      runs the job on this machine")
    print(f"  {in_project(f'{program()} vertex {name} --dry-run')}\n      shows the plan and its cost")


def other_name(path: Path) -> str:
    """Return the first name of `job-2.yaml`, `job-3.yaml`, … that is free."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return shlex.quote(next(name for name in names if not name.exists()).as_posix())
