"""`launch move`: move a run that has ended to another place, to continue it there."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.flows.find_run import find_run
from launcher.cli.options import Last, Regions, RunName
from launcher.cli.ui.streams import say
from launcher.inputs.gather import full_path
from launcher.runs.moving import move_run
from launcher.runs.on_host import host_and_run, remember
from launcher.text import relative


def move(
    run: RunName,
    to: Annotated[
        str, typer.Argument(metavar="[TO]", help="gs://BUCKET/PATH, ssh://HOST/~/launch/runs or a folder here.")
    ] = "runs",
    *,
    regions: Regions = None,
    last: Last = False,
) -> None:
    """Move a run that has ended to another place, to continue it there.

    Copies its folder, checks each file, and closes the old folder: no start continues there any more. The command can
    be repeated after an interruption. The old folder remains; launch rm with its path or HOST:RUN deletes it.
    """
    place = to if to.startswith(("gs://", "ssh://")) else full_path(to)
    moved = find_run(run, regions, last=last)
    folder = move_run(moved, place, say)
    there = host_and_run(folder)
    remember(moved.id, there[0] if there else None)
    print(f"moved to {relative(folder)}")
