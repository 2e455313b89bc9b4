"""`launch vertex`: run a training job on Vertex AI."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli.flows.image import BuilderFlag, CreateRepository
from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import DryRun, Flags, Output, OutputFormat, SpecFile, WatchFor, flags_of
from launcher.errors import UsageError

CpuMachine = Annotated[str | None, typer.Option("--cpu-machine", hidden=True)]
"""A machine type without GPUs, in place of the spec's, for `launch selftest`."""


def vertex(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    dry_run: DryRun = False,
    detach: Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the job is created.")] = False,
    resume: Annotated[str | None, option(RUN, "--resume", help="Resume a run that has ended.", metavar="RUN")] = None,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, although this job has run before.")] = False,
    watch_for: WatchFor = None,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    cpu_machine: CpuMachine = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a training job on Vertex AI.

    Plans the run (--dry-run shows the plan), builds the image if needed, submits one job and follows it to its end.
    Where there is no capacity, the next region or provisioning model is tried. The same command on an active run
    follows that run.
    """
    from launcher.cli.flows.plan import planned
    from launcher.cli.gather import gather
    from launcher.cli.ui.plan_page import show
    from launcher.plan.cpu import on_cpu

    flags = flags_of(ctx)
    check(dry_run, detach, resume, new, watch_for, flags)
    if dry_run:
        made = planned(gather("vertex", spec, flags))
        show(on_cpu(made, cpu_machine) if cpu_machine else made, output_format)
        return
    from launcher.cli.flows.launch import LaunchOptions, launch_or_resume

    options = LaunchOptions(
        detach=detach,
        watch_seconds=watch_for,
        builder=builder,
        create_repository=create_repository,
        cpu_machine=cpu_machine,
    )
    launch_or_resume(spec, flags, options, output_format, resume=resume, new=new)


def check(dry_run: bool, detach: bool, resume: str | None, new: bool, watch_for: str | None, flags: Flags) -> None:
    """Check combinations of flags. Raises UsageError."""
    given = {"--detach": detach, "--resume": resume, "--new": new, "--watch-for": watch_for}
    if dry_run and (flag := next((name for name, value in given.items() if value), None)):
        raise UsageError(f"{flag} cannot be combined with --dry-run", "Remove one of them.")
    if resume is not None and resume.startswith("-"):  # a flag that stood where the run should
        raise UsageError(f"--resume needs a run, not {resume!r}", "launch status lists the runs.")
    if new and (resume or flags.run_id is not None):
        other = "--resume" if resume else "--run-id"
        raise UsageError(f"{other} cannot be combined with --new", "--new chooses the run ID. Remove one of them.")
    if resume and flags.run_id is not None:
        raise UsageError("--run-id cannot be combined with --resume", "--resume names the run. Remove one of them.")
    if detach and watch_for:
        raise UsageError(
            "--watch-for cannot be combined with --detach", "--detach watches nothing. Remove one of them."
        )
