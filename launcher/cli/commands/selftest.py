"""`launch selftest`: run every feature once in a project, on small machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.help_page import COMMON, COST, RUN, WHERE, option


def selftest(
    bundle: Annotated[
        Path | None, typer.Argument(metavar="[BUNDLE]", help="With --compare: read this bundle; run nothing.")
    ] = None,
    *,
    project: Annotated[
        str | None,
        option(WHERE, "--project", help="Project; default: gcloud's.", metavar="PROJECT"),
    ] = None,
    region: Annotated[
        str | None, option(WHERE, "--region", help="Region; default: gcloud's.", metavar="REGION")
    ] = None,
    usd: Annotated[float, option(COST, "--usd", help="Refuse to run if it could cost more.", metavar="USD")] = 5.0,
    only: Annotated[
        str,
        option(RUN, "--only", help="Some of cpu,vertex,vm,preempt,push; default: all.", metavar="WHAT"),
    ] = "",
    clean: Annotated[bool, option(RUN, "--clean", help="Delete what a killed selftest left, and exit.")] = False,
    compare: Annotated[bool, option(RUN, "--compare", help="List where the loopback cloud differs.")] = False,
    yes: Annotated[bool, option(COMMON, "--yes", help="Skip the confirmation.")] = False,
    repository: Annotated[str, typer.Option("--repository", hidden=True)] = "",
) -> None:
    """Run every feature once in a project and report what works.

    Shows what it creates and the maximum cost, asks for confirmation, runs, deletes everything, and writes a redacted
    bundle for bug reports. docs/selftest.md describes the steps.
    """
    from launcher.cli.flows.selftest import run_selftest

    run_selftest(
        bundle,
        project,
        region,
        max_usd=usd,
        groups=[word for word in only.split(",") if word],
        clean=clean,
        compare=compare,
        yes=yes,
        repository=repository,
    )
