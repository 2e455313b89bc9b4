"""`launch init`: write a starter spec."""

from __future__ import annotations

import shlex
from itertools import count
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.flows.suggestions import in_project, typed_program
from launcher.errors import UsageError
from launcher.spec.starter import STARTER


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("job.yaml"),
) -> None:
    """Write a commented starter spec."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError:
        other = "a file, such as job.yaml"
        if not path.is_dir():
            names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
            free = next(name for name in names if not name.exists())
            other = f"another name: launch init {shlex.quote(free.as_posix())}"
        raise UsageError(f"{path} already exists", f"launch init does not overwrite it. Choose {other}") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", "Name a file in a folder that exists.") from error
    name = shlex.quote(path.as_posix())
    print(f"Wrote {path}. Next:")
    print(f"  {typed_program()} local {name} --gpus 2\n      runs the job on this machine")
    print(f"  {in_project(f'{typed_program()} vertex {name} --dry-run')}\n      shows the plan and its cost")
