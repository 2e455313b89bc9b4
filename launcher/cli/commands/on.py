"""`launch on HOST`: run a training job on a machine that is reached by SSH."""

# No `from __future__ import annotations`: Typer would compile the annotations at every start, twice.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from launcher.cli.help_page import MACHINE, OUTPUT, RUN, WHERE, option
from launcher.cli.options import (
    AcceptHostKey,
    Container,
    DryRun,
    Explain,
    Mounts,
    Output,
    OutputFormat,
    WatchFor,
    flag_words,
    flags_of,
)
from launcher.errors import refuse_with

if TYPE_CHECKING:
    from launcher.remote.connection import Connection


def on(
    ctx: typer.Context,
    host: Annotated[
        str,
        typer.Argument(
            metavar="HOST",
            help="A host of ~/.ssh/config or hosts.yaml, USER@HOST[:PORT], or colab:NAME; HOST,HOST: one node on each.",
        ),
    ],
    spec: Annotated[
        Path | None, typer.Argument(metavar="[SPEC]", help="The job's YAML file; default: the built-in job.")
    ] = None,
    *,
    cpu: Annotated[bool, option(MACHINE, "--cpu", help="Run on the host's CPUs, without GPUs.")] = False,
    python: Annotated[
        str | None, option(RUN, "--python", help="The Python on the host that runs the job.", metavar="PATH")
    ] = None,
    container: Container = None,
    mount: Mounts = None,
    dry_run: DryRun = False,
    explain: Explain = False,
    detach: Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the job runs.")] = False,
    resume: Annotated[str | None, option(RUN, "--resume", help="Resume a run that has ended.", metavar="RUN")] = None,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, even if this job has run before.")] = False,
    clean: Annotated[bool, option(WHERE, "--clean", help="Remove unneeded files of launch from the host.")] = False,
    accept_host_key: AcceptHostKey = False,
    watch_for: WatchFor = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a training job on a machine that you reach by SSH.

    Plans the run (--dry-run shows the plan, without a connection), checks GPUs, disk and Python of the host, sends the
    code and starts the job, which outlives the connection. The same command on an active run follows that run.

    --clean removes code, environments, versions of launch and records of jobs that no running job and no run folder
    there needs (--dry-run lists them). Runs stay: launch rm deletes them.
    """
    from msgspec import convert

    from launcher.cli.flows.on_host import HostOptions, launch_on_host

    flags = flags_of(ctx)
    if clean:
        from launcher.remote.connection import connect_to

        of_job: dict[str, object] = {word: True for word in flag_words(flags) if word.startswith("--")}
        names = ("spec", "cpu", "python", "container", "mount", "explain", "detach", "resume", "new", "watch_for")
        of_job |= {f"--{name.replace('_', '-')}".replace("--spec", "a spec"): ctx.params[name] for name in names}
        refuse_with("--clean", of_job)
        clean_host(connect_to(host, accept_host_key=accept_host_key), output_format, dry_run=dry_run)
        return
    launch_on_host(host, spec, flags, convert(ctx.params, HostOptions), output_format, f"launch on {host}")


CLEAN_SECONDS: Final = 600.0
CLEANED: Final = {
    "trainer": "launch version",
    "code": "code version",
    "venvs": "environment",
    "images": "container image",
    "jobs": "job record",
    "work": "working folder",
    "runs-locked": "run lock",
}
"""Folder below ~/launch -> what it holds."""


def clean_host(connection: "Connection", output_format: Output, *, dry_run: bool) -> None:
    """Remove unneeded files from a host and print their sizes. Raises LaunchError."""
    from launcher.cli.ui.documents import printed
    from launcher.remote.agent import Agent, trainer_digest
    from launcher.text import plural, size_text

    request = {"trainer": trainer_digest(), "dry_run": dry_run}
    removed = Agent(connection).call("clean", request, seconds=CLEAN_SECONDS)
    if output_format is not Output.text:
        printed({"removed": removed, "dry_run": dry_run}, output_format)
        return
    for folder, name in CLEANED.items():
        if sizes := [item["bytes"] for item in removed if item["path"].startswith(f"{folder}/")]:
            print(f"{plural(len(sizes), name)}: {size_text(sum(sizes))}")
    total = size_text(sum(item["bytes"] for item in removed))
    print(f"{'would remove' if dry_run else 'removed'} {total} below {connection.host.name}:~/launch")
