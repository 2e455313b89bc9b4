"""`launch local`: the rendered Vertex request, on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import Flags, Output, OutputFormat, SpecFile, flags_of
from launcher.errors import UsageError

if TYPE_CHECKING:
    from launcher.cli.gather import Inputs
    from launcher.plan.model import Plan


def local(
    ctx: typer.Context,
    spec: SpecFile = None,
    *,
    request: Annotated[
        Path | None,
        option(RUN, "--request", help="Run this CustomJob (JSON) instead of a spec.", metavar="FILE"),
    ] = None,
    code: Annotated[
        Path | None,
        option(RUN, "--code", help="With --request: the folder with your code.", metavar="DIR"),
    ] = None,
    in_place: Annotated[
        bool,
        option(RUN, "--in-place", help="Run in the code folder itself instead of in a copy."),
    ] = False,
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, although this job has run before.")] = False,
    preempt_after: Annotated[
        str | None,
        option(RUN, "--preempt-after", help="Preempt the job after this time (15s), then restart it.", metavar="TIME"),
    ] = None,
    docker: Annotated[bool, option(RUN, "--docker", help="Run the image: one container for each replica.")] = False,
    # For who plays the platform: the run folder is that of whoever submitted the job, and so are its locks.
    as_job: Annotated[str | None, typer.Option("--as-job", hidden=True, metavar="ID")] = None,
    dry_run: Annotated[bool, option(OUTPUT, "--dry-run", help="Print the request; start nothing.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a job on this machine as Vertex AI would.

    Reads only the rendered Vertex AI request. Starts one process for each GPU, on CPUs if there are none. Each start
    runs in a fresh copy of the files that the image would have; with --docker, in a container of the image.
    """
    flags = flags_of(ctx)
    check_start(dry_run, new, preempt_after, flags, request)
    check_in_place(in_place, docker)
    seconds = preemption_seconds(preempt_after)
    if request:
        if docker and code:
            raise UsageError("--docker runs the image, which has its own code: --code can't go with it")
        of_request(request, spec, code, in_place, flags, dry_run, seconds, docker, as_job, output_format)
    elif as_job:
        raise UsageError("--as-job goes with --request alone")
    elif code:
        raise UsageError("--code goes with --request alone", "A spec names its code itself: image.code.")
    else:
        of_spec(spec, flags, dry_run, new, seconds, docker, in_place, output_format)


def check_start(dry_run: bool, new: bool, preempt_after: str | None, flags: Flags, request: Path | None) -> None:
    """Flags about how a job is started that can't go together. Raises UsageError."""
    if dry_run and (preempt_after is not None or new):
        flag = "--new" if new else "--preempt-after"
        raise UsageError(f"--dry-run starts nothing: {flag} can't go with it", "Leave one of them out.")
    if new and flags.run_id is not None:
        raise UsageError("--new chooses the run's id: --run-id can't go with it", "Leave one of them out.")
    if new and request:
        raise UsageError("--request is run as it stands: --new can't go with it", "--output DIR runs it anew there.")


def check_in_place(in_place: bool, docker: bool) -> None:
    """Raises UsageError."""
    if in_place and docker:
        raise UsageError("--docker runs the image, which has its own code: --in-place can't go with it")


def preemption_seconds(text: str | None) -> float | None:
    """When to preempt. Raises UsageError."""
    if text is None:
        return None
    from launcher.cli.ui.text import flag_seconds

    return flag_seconds(text, "--preempt-after")


def of_request(
    path: Path,
    spec: Path | None,
    code: Path | None,
    in_place: bool,
    flags: Flags,
    dry_run: bool,
    preempt_after: float | None,
    docker: bool,
    as_job: str | None,
    output_format: Output,
) -> None:
    """Show a request from a file, or run it."""
    from launcher.cli.flows import rehearse, request_file
    from launcher.cli.flows.rehearse import Rehearsal
    from launcher.rehearsal.workdirs import Code
    from launcher.workspace import code_files, content

    body, folder = request_file.load(path, spec, flags), request_file.folder(code)
    if dry_run:
        request_file.show(body, output_format, docker=docker)
        return
    found = code_files.code(folder).files if folder else []
    job = Rehearsal(
        request=body,
        code=Code(found, folder if in_place else None),
        content=content.content(found).digest if folder else "",
        preempt_after=preempt_after,
        docker=docker,
        job_id=as_job,
    )
    rehearse.run(job, output_format)


def of_spec(
    spec: Path | None,
    flags: Flags,
    dry_run: bool,
    new: bool,
    preempt_after: float | None,
    docker: bool,
    in_place: bool,
    output_format: Output,
) -> None:
    """Plan a spec; show the plan, or run it."""
    from launcher.cli.flows import rehearse
    from launcher.cli.flows.plan import planned
    from launcher.cli.flows.preemption import say
    from launcher.cli.flows.rehearse import Rehearsal
    from launcher.cli.flows.suggestions import Typed
    from launcher.cli.gather import gather
    from launcher.cli.ui.plan_page import show
    from launcher.rehearsal.workdirs import Code

    inputs = gather("local", spec, flags, in_place=in_place)
    if docker:
        inputs = for_this_machine(inputs)
    made = planned(inputs)
    if dry_run:
        show(made, output_format, image=docker)
        return
    with inputs.located.naming_places():
        check_kernels(inputs)
    if new:
        made = anew(made, inputs)
    for warning in made.warnings:
        say(f"warning: {warning}")
    image = None
    if docker:
        made, image = in_engine(made, inputs)
    job = Rehearsal(
        request=made.attempts[0].request,
        code=Code(inputs.source.code, inputs.code if in_place else None),
        content=inputs.context.code.digest,
        plan=made,
        typed=Typed(spec, flags),
        preempt_after=preempt_after,
        docker=docker,
        image=image,
    )
    rehearse.run(job, output_format)


GPUS_ALONE = {"precision": ("fp16", "tf32"), "attention": ("efficient", "cudnn")}
"""What only a GPU has of what `run.config` can ask for."""


def check_kernels(inputs: Inputs) -> None:
    """Numbers and kernels that only a GPU has, on a machine without one. Raises UsageError."""
    from launcher.rehearsal.on_host import visible_gpus

    run = inputs.spec.run
    for key, kinds in GPUS_ALONE.items() if run.is_builtin else ():
        if (asked := run.config.get(key)) in kinds and not visible_gpus(os.environ):
            raise UsageError(
                f"run.config.{key}: {asked} needs a GPU, and this machine has none",
                f"Rehearse with --set run.config.{key}=auto",
                field=f"run.config.{key}",
            )


def for_this_machine(inputs: Inputs) -> Inputs:
    """Where there are no GPUs, PyTorch without CUDA: gigabytes less, and all that can be used."""
    from msgspec.structs import replace

    from launcher.rehearsal.on_host import visible_gpus

    image = inputs.spec.image
    if image.uri or image.wheel or visible_gpus(os.environ):
        return inputs
    return inputs._replace(spec=replace(inputs.spec, image=replace(image, wheel="cpu")))


def in_engine(made: Plan, inputs: Inputs) -> tuple[Plan, str]:
    """The plan with its image in this machine's engine, and the name that it has there. Raises LaunchError."""
    from launcher.cli.flows.image import wanted
    from launcher.cli.ui.progress_bars import progress, report
    from launcher.images import pipeline
    from launcher.plan.build import with_digest

    with progress() as bars:
        found = pipeline.here(wanted(inputs), os.environ, report(bars))
    return (with_digest(made, found.reference) if "@" in found.reference else made), found.reference


def anew(made: Plan, inputs: Inputs) -> Plan:
    """The plan of the same job as a run of its own."""
    from msgspec.structs import replace

    from launcher.cli.flows.plan import planned
    from launcher.cli.flows.rehearsal_folder import new_run

    run = new_run(made.run, made.run_folder or "")
    return planned(inputs._replace(context=replace(inputs.context, run_id=run)))
