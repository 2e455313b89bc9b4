"""`launch vm`: a Deep Learning VM to work on over SSH, or with --run a VM that trains and deletes itself."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.options import Flags, Output, SpecFile, with_flags
from launcher.errors import UsageError


@with_flags
def vm(
    spec: SpecFile = None,
    *,
    flags: Flags,
    run: Annotated[bool, typer.Option("--run", help="Run the spec's job, then delete the VM.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; send nothing.")] = False,
    output_format: Annotated[Output, typer.Option("-o", help="What to print.")] = Output.text,
) -> None:
    """Plan a VM to work on, or one that trains.

    A Deep Learning VM for work over SSH; with --run a VM that runs the job and deletes itself at the end.
    """
    from launcher import catalog
    from launcher.cli.inputs import gather
    from launcher.cli.show import show
    from launcher.plan.build import plan

    if not dry_run:
        raise UsageError("this version plans VMs; it doesn't create them yet", "Add --dry-run.")
    inputs = gather("vm", spec, flags, training=run)
    show(plan(inputs.spec, catalog.load(), inputs.context), output_format)
