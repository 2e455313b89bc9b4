"""`launch local`: the rendered Vertex request, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli.options import Flags, Output, SpecFile, with_flags

if TYPE_CHECKING:
    pass


@with_flags
def local(
    spec: SpecFile = None,
    *,
    flags: Flags,
    request: Annotated[
        Path | None, typer.Option("--request", help="Run this CustomJob (JSON) instead of a spec.", metavar="FILE")
    ] = None,
    code: Annotated[
        Path | None, typer.Option("--code", help="With --request: the folder with your code.", metavar="DIR")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request; start nothing.")] = False,
    output_format: Annotated[Output, typer.Option("-o", help="What to print.")] = Output.text,
) -> None:
    """Run a job on this machine as Vertex AI would.

    Takes the rendered Vertex request and nothing else: a process for each GPU, and CPUs will do.
    """
    from launcher.cli import rehearsal

    job = rehearsal.of_request(request, code, flags) if request else of_spec(spec, flags, dry_run, output_format)
    if job:
        rehearsal.run(job, output_format)


def of_spec(spec: Path | None, flags: Flags, dry_run: bool, output_format: Output) -> Any:
    """Plan a spec; with --dry-run show the plan and return None."""
    from launcher import catalog
    from launcher.cli import rehearsal
    from launcher.cli.inputs import gather
    from launcher.cli.show import show
    from launcher.plan.build import plan

    inputs = gather("local", spec, flags)
    made = plan(inputs.spec, catalog.load(), inputs.context)
    if dry_run:
        show(made, output_format)
        return None
    return rehearsal.of_plan(made, inputs.code)
