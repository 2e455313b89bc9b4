"""`launch doctor`: check this machine and this project."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.cli.help_page import OUTPUT, WHERE, option
from launcher.cli.options import Output, OutputFormat
from launcher.cli.style import styled
from launcher.cli.ui.documents import printed
from launcher.errors import LaunchError, UsageError
from launcher.inputs.gather import gather, project
from launcher.inputs.gcloud_config import default_regions
from launcher.inputs.planning import planned
from launcher.project.machine import check_machine, read_machine
from launcher.project.model import Check
from launcher.project.needs import needs_of
from launcher.project.preflight import check_needs, check_project
from launcher.project.report import data, lines
from launcher.spec.reader import Override
from launcher.text import plural

DEFAULT_REGION = "us-central1"
"""Checked if neither --region nor gcloud's settings name a region."""

Half = Literal["machine", "project"]
Target = Literal["vertex", "vm"]


def doctor(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="Check what this job needs; default: launch's defaults."),
    ] = None,
    *,
    target: Annotated[Target, option(WHERE, "--for", help="Check the project for Vertex AI or VMs.")] = "vertex",
    only: Annotated[Half | None, option(OUTPUT, "--only", help="Check only the machine or the project.")] = None,
    region: Annotated[
        list[str] | None, option(WHERE, "--region", help="Region to check; repeatable.", metavar="REGION")
    ] = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Check this machine and project, and show the fixes.

    Each problem comes with the command that fixes it. Changes nothing. ✓ fine, ! may cause trouble, ✗ must be fixed,
    ? could not be checked. Exits with 0 if no check is ✗.
    """
    halves: dict[str, tuple[Check, ...]] = {}
    if only != "project":
        halves["machine"] = check_machine(read_machine(os.environ))
    if only != "machine":
        halves["project"] = project_half(spec, region, target)
    failed = sum(check.status == "failed" for checks in halves.values() for check in checks)
    error = LaunchError(f"{plural(failed, 'problem')} found", "See the lines marked ✗.") if failed else None
    show_halves(halves, output_format, error)
    if error:
        raise error


def project_half(spec: Path | None, regions: list[str] | None, target: Target) -> tuple[Check, ...]:
    """Return the checks of the spec's project, or of gcloud's. Without a project, only that."""
    if spec is not None:
        changes = [Override("regions", regions, "--region")] if regions else []
        plan = planned(gather(target, spec, changes))
        return check_needs(needs_of(plan), os.environ, plan if target == "vm" else None)
    try:
        name = project(target, os.environ)
    except UsageError as error:
        fix = "gcloud config set project PROJECT"
        return (Check("project", "warning", error.problem, fix),)
    chosen = tuple(regions or default_regions(os.environ) or (DEFAULT_REGION,))
    return check_project(name, chosen, os.environ, vms=target == "vm")


def show_halves(halves: dict[str, tuple[Check, ...]], output: Output, error: LaunchError | None) -> None:
    if output is not Output.text:
        document = {name: data(checks) for name, checks in halves.items()}
        printed(document, output, error)
        return
    titles = {"machine": "This machine", "project": "This project"}
    for number, (name, checks) in enumerate(halves.items()):
        print(("\n" if number else "") + styled(titles[name], "1"))
        for line in lines(checks):
            colour = {"✓": "32", "!": "33", "✗": "31"}.get(line[:1])
            print(styled(line[0], colour) + line[1:] if colour else line)
