"""`launch logs`: all that a run's job has printed."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.options import Output, Regions, RunName


def logs(
    run: RunName,
    *,
    regions: Regions = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with new lines until it ends.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", help="Only the last N lines.", metavar="N", min=0)] = None,
    output_format: Annotated[Output, typer.Option("-o", help="What to print; json: a line each.")] = Output.text,
) -> None:
    """Print what a run's job has printed.

    From Cloud Logging, else from the run's folder. The newest attempt; `launch status` names the others' jobs.
    """
    from launcher.cli.printing import show
    from launcher.cli.runs import one_job, searched
    from launcher.cli.world import here

    world = here()
    show(world, one_job(world, run, searched(regions)), output_format, tail=tail, follow=follow)
