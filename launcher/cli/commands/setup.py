"""`launch setup`: show what a project lacks, and with --yes do it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import launcher.clock
from launcher.cli.help_page import COMMON, MACHINE, WHERE, option
from launcher.cli.options import Output, OutputFormat
from launcher.cli.ui.documents import printed
from launcher.cli.ui.text import wrapped
from launcher.errors import NotAuthorised
from launcher.inputs.gather import project
from launcher.inputs.gcloud_config import default_regions
from launcher.project.report import shell_lines
from launcher.project.setup import Setup, apply, parse_quota, read_setup, ticket
from launcher.text import plural

DEFAULT_REGION = "us-central1"

Target = Literal["vertex", "vm", "both"]


def setup(
    *,
    target: Annotated[Target, option(WHERE, "--for", help="What to prepare the project for.")] = "vertex",
    region: Annotated[
        str | None, option(WHERE, "--region", help="Region of the bucket, Cloud NAT and quotas.", metavar="REGION")
    ] = None,
    network: Annotated[str, option(WHERE, "--network", help="Network of the VMs.", metavar="NAME")] = "default",
    request_quota: Annotated[
        list[str] | None,
        option(MACHINE, "--request-quota", help="Request GPU quota for --for: h100:8, l4:4:spot.", metavar="GPU:N"),
    ] = None,
    yes: Annotated[bool, option(COMMON, "--yes", "-y", help="Create what is missing; default: only show it.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Show what a project lacks; --yes creates it.

    Enables APIs and creates the image repository, the bucket for runs, a service account for jobs with its roles, and
    for VMs firewall rules and Cloud NAT. In an existing default bucket it turns on uniform access and turns off soft
    delete. The command can be repeated.
    """
    quotas = [parse_quota(request) for request in request_quota or ()]
    setup_state = read_setup(
        project("vertex", os.environ),
        os.environ,
        region=region or (*default_regions(os.environ), DEFAULT_REGION)[0],
        vertex=target != "vm",
        vms=target != "vertex",
        network=network,
        quotas=quotas,
    )
    is_text, refused, missing = output_format is Output.text, None, ", ".join(setup_state.missing)
    if missing:
        problem = f"you lack {missing} in project {setup_state.target.project}: nothing was changed"
        refused = NotAuthorised(problem, "Send the commands above to an administrator of the project.")
    if is_text:
        print("\n".join(setup_page(setup_state, commands=not yes or refused is not None)))
    elif not yes or refused:
        printed(document(setup_state, ()), output_format, refused)
    if refused:
        raise refused
    if not yes:
        return
    finished: list[str] = []

    def done(text: str) -> None:
        finished.append(text)
        if is_text:
            print("\n".join(step_lines("✓", text)), flush=True)

    apply(setup_state.pending, launcher.clock.REAL, done)
    if not is_text:
        printed(document(setup_state, finished), output_format)
    elif finished:
        print(f"project {setup_state.target.project} is ready; check it with launch doctor")


def setup_page(setup_state: Setup, *, commands: bool) -> Iterator[str]:
    """Yield what exists, and what is missing with its commands: for an administrator if the caller may not do it."""
    target = setup_state.target
    yield f"project {target.project}, region {target.region}"
    for step in setup_state.done:
        yield from step_lines("✓", step.text)
    if setup_state.missing:
        yield ""
        yield from ticket(setup_state.pending, target.project, target.caller.partition(":")[2])
        return
    if not target.caller:
        yield "! your account is unknown, so you get no right to act as the service account:"
        yield "    gcloud config set account YOU@EXAMPLE.COM"
    for step in setup_state.pending if commands else ():
        yield from step_lines("+", step.text)
        for command in step.command.splitlines():
            yield from (f"    {line}" for line in shell_lines(command, 76))
    if not setup_state.pending:
        yield "nothing to do"
    elif commands:
        yield f"{plural(len(setup_state.pending), 'step')} to do: launch setup --yes, or the commands above"


def step_lines(sign: str, text: str) -> Iterator[str]:
    """Yield a step, wrapped."""
    for number, line in enumerate(wrapped(text, 78)):
        yield f"{' ' if number else sign} {line}"


def document(setup_state: Setup, finished: list[str] | tuple[str, ...]) -> dict[str, Any]:
    """Return the steps for scripts (docs/output.md)."""
    pending = {step.text for step in setup_state.pending}
    every = [
        {
            "name": step.name,
            "text": step.text,
            "status": "missing" if step.text in pending and step.text not in finished else "done",
            "command": step.command,
        }
        for step in (*setup_state.done, *setup_state.pending)
    ]
    return {"project": setup_state.target.project, "region": setup_state.target.region, "steps": every}
