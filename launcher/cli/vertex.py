"""`launch vertex`: a training job on Vertex AI."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.options import Flags, Output, SpecFile, with_flags
from launcher.errors import UsageError


@with_flags
def vertex(
    spec: SpecFile = None,
    *,
    flags: Flags,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; send nothing.")] = False,
    output_format: Annotated[Output, typer.Option("-o", help="What to print.")] = Output.text,
) -> None:
    """Plan a training job on Vertex AI.

    What is sent, where it is tried in which order, and what it may cost.
    """
    from launcher import catalog
    from launcher.cli.inputs import gather
    from launcher.cli.show import show
    from launcher.plan.build import plan

    if not dry_run:
        raise UsageError(
            "this version plans and rehearses; it doesn't submit yet",
            "Add --dry-run. With -o yaml it prints a file for gcloud ai custom-jobs create, and the command.",
        )
    inputs = gather("vertex", spec, flags)
    show(plan(inputs.spec, catalog.load(), inputs.context), output_format)
