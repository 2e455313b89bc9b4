"""`launch vertex`: run a training job on Vertex AI."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.help_page import OUTPUT, RUN, WHERE, option
from launcher.cli.options import (
    BuilderFlag,
    CreateRepository,
    DryRun,
    Explain,
    Flags,
    Offline,
    Output,
    OutputFormat,
    ResumeLast,
    SpecFile,
    WatchFor,
    Yes,
    flags_of,
    gather,
)
from launcher.cli.ui.streams import say
from launcher.errors import UsageError, refuse_with

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs

CpuMachine = Annotated[str | None, typer.Option("--cpu-machine", hidden=True)]
"""A machine type without GPUs, in place of the spec's, for `launch selftest`."""
NoPreflight = Annotated[bool, option(WHERE, "--no-preflight", help="Skip the preflight checks.")]
Preflight = Annotated[bool, option(WHERE, "--preflight", help="Run the preflight checks only; submit nothing.")]


def vertex(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    dry_run: DryRun = False,
    explain: Explain = False,
    detach: Annotated[bool, option(OUTPUT, "--detach", help="Return as soon as the job is created.")] = False,
    preflight: Preflight = False,
    no_preflight: NoPreflight = False,
    resume: Annotated[str | None, option(RUN, "--resume", help="Resume a run that has ended.", metavar="RUN")] = None,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, even if this job has run before.")] = False,
    last: ResumeLast = False,
    watch_for: WatchFor = None,
    builder: BuilderFlag = "auto",
    create_repository: CreateRepository = False,
    yes: Yes = False,
    offline: Offline = False,
    cpu_machine: CpuMachine = None,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a training job on Vertex AI.

    Plans the run (--dry-run shows the plan), builds the image if needed, submits one job and follows it to its end.
    If there is no capacity, launch tries the next region, provisioning model or machine type. The same command on an
    active run follows that run.
    """
    from launcher.cli.ui.plan_page import show_plan
    from launcher.inputs.planning import planned

    flags = flags_of(ctx)
    dry_run = dry_run or explain
    check_run_flags(dry_run, detach, resume, new, watch_for, flags, last)
    if preflight:
        refuse_with("--preflight", {"--no-preflight": no_preflight, "--dry-run": dry_run, "--resume": resume})
        preflight_only(gather("vertex", spec, flags), output_format, creates_repository=create_repository)
        return
    if dry_run:
        inputs = gather("vertex", spec, flags)
        plan = planned(inputs, offline=offline)
        if cpu_machine:
            from launcher.plan.cpu import on_cpu

            plan = on_cpu(plan, cpu_machine)
        show_plan(plan, inputs.spec, output_format, settings=inputs.settings, explain=explain)
        return
    from launcher.cli.flows.launch import LaunchOptions, launch_or_resume
    from launcher.runs.submit import SubmitOptions

    options = LaunchOptions(
        detach=detach,
        watch_seconds=watch_for,
        yes=yes,
        offline=offline,
        cpu_machine=cpu_machine,
        last=last,
        submit=SubmitOptions(builder=builder, create_repository=create_repository, preflight=not no_preflight),
    )
    launch_or_resume(spec, flags, options, output_format, resume=resume, new=new)


def preflight_only(inputs: "Inputs", output: Output, *, creates_repository: bool = False) -> None:
    """Run all checks of a plan and print every result; submit nothing.

    Raises PlanRefused, NoCapacity, NotAuthorised: no placement is left.
    """
    from launcher.cli.flows.cloud import of_project
    from launcher.cli.ui.documents import printed
    from launcher.inputs.planning import planned, planned_image
    from launcher.project.preflight import allowed, check_plan, refusal
    from launcher.project.report import data, lines, summary
    from launcher.runs.image import check_contents

    plan = planned(inputs)
    compute = of_project(plan.project).compute
    results = check_plan(plan, os.environ, compute, creates_repository=creates_repository)
    attempts = allowed(plan, results)
    refused = None if attempts else refusal(results)
    if output is Output.text:
        print("\n".join(lines(result for result in results if attempts or result.status != "failed")))
        print(summary(results) or "all checks passed")
    else:
        keys = ("region", "zone", "provisioning", "machine_type")
        places = [{key: getattr(attempt, key) for key in keys} for attempt in attempts]
        printed({"checks": data(results), "placements": places}, output, refused)
    if refused:
        raise refused
    if plan.image:
        check_contents(inputs, planned_image(inputs), os.environ, say)


def check_run_flags(
    dry_run: bool, detach: bool, resume: str | None, new: bool, watch_for: float | None, flags: Flags, last: bool
) -> None:
    """Check combinations of flags. Raises UsageError."""
    if last and not resume:
        raise UsageError("--last requires --resume", "Name the run: --resume NAME --last")
    if dry_run:
        refuse_with("--dry-run", {"--detach": detach, "--resume": resume, "--new": new, "--watch-for": watch_for})
    if resume is not None and resume.startswith("-"):  # a flag that stood where the run should
        raise UsageError(f"--resume needs a run, not {resume!r}", "launch runs lists the runs.")
    if new and (resume or flags.run_id is not None):
        other = "--resume" if resume else "--run-id"
        raise UsageError(f"{other} cannot be combined with --new", "--new chooses the run ID. Remove one of them.")
    if resume and flags.run_id is not None:
        raise UsageError("--run-id cannot be combined with --resume", "--resume names the run. Remove one of them.")
    if detach and watch_for:
        raise UsageError(
            "--watch-for cannot be combined with --detach", "--detach watches nothing. Remove one of them."
        )
