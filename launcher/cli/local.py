"""`launch local`: the rendered Vertex request, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.options import Flags, Output, SpecFile, with_flags, words
from launcher.errors import UsageError


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
    if request:
        of_request(request, spec, code, flags, dry_run, output_format)
    elif code:
        raise UsageError("--code goes with --request alone", "A spec names its code itself: image.code.")
    else:
        of_spec(spec, flags, dry_run, output_format)


def of_request(
    path: Path, spec: Path | None, code: Path | None, flags: Flags, dry_run: bool, output_format: Output
) -> None:
    """Show a request from a file, or run it."""
    from launcher.cli import rehearsal, request

    body, folder = request.load(path, spec, flags), request.folder(code)
    if dry_run:
        request.show(body, output_format)
    else:
        rehearsal.run(rehearsal.Rehearsal(request=body, code=folder), output_format)


def of_spec(spec: Path | None, flags: Flags, dry_run: bool, output_format: Output) -> None:
    """Plan a spec; show the plan, or run it."""
    from launcher import catalog
    from launcher.cli import rehearsal
    from launcher.cli.inputs import gather
    from launcher.cli.show import show
    from launcher.plan.build import plan

    inputs = gather("local", spec, flags)
    made = plan(inputs.spec, catalog.load(), inputs.context)
    if dry_run:
        show(made, output_format)
    else:
        typed = (*([str(spec)] if spec else []), *words(flags))
        job = rehearsal.Rehearsal(request=made.attempts[0].request, code=inputs.code, plan=made, typed=typed)
        rehearsal.run(job, output_format)
