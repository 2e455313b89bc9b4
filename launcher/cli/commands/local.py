"""`launch local`: run the rendered Vertex AI request on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch_train import runfolder
from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import Flags, Output, OutputFormat, ResumeLast, SpecFile, flags_of, gather, overrides
from launcher.errors import UsageError, refuse_with

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
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
    new: Annotated[bool, option(RUN, "--new", help="Start a fresh run, even if this job has run before.")] = False,
    resume: Annotated[
        str | None,
        option(RUN, "--resume", help="Continue a local run, with the code as it is now.", metavar="RUN"),
    ] = None,
    last: ResumeLast = False,
    preempt_after: Annotated[
        str | None,
        option(RUN, "--preempt-after", help="Preempt the job after this time (15s), then restart it.", metavar="TIME"),
    ] = None,
    setup: Annotated[
        bool,
        option(RUN, "--setup", help="First run the lines of image.setup on this machine."),
    ] = False,
    docker: Annotated[bool, option(RUN, "--docker", help="Run the image: one container for each replica.")] = False,
    python: Annotated[
        str | None,
        option(RUN, "--python", help="The Python that runs the job: .venv/bin/python.", metavar="PYTHON"),
    ] = None,
    dry_run: Annotated[bool, option(OUTPUT, "--dry-run", help="Print the request; start nothing.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Run a job on this machine as Vertex AI would.

    Reads only the rendered Vertex AI request. Starts one process for each GPU, on CPUs if there are none. Each start
    runs in a fresh copy of the files that the image would contain; with --docker, in a container of the image.
    """
    flags = flags_of(ctx)
    check_start(dry_run, new, preempt_after, flags, request)
    if docker:
        hint = "The image has its own code and its own Python."
        refuse_with("--docker", {"--in-place": in_place, "--python": python}, hint)
    for flag, value in {"--docker": docker, "--dry-run": dry_run, "--request": request}.items():
        if setup and value:
            hint = "The image contains what the setup does." if docker else "Remove one of them."
            raise UsageError(f"--setup cannot be combined with {flag}", hint)
    if last and not resume:
        raise UsageError("--last requires --resume", "Name the run: --resume NAME --last")
    if resume is not None:
        refuse_with("--resume", {"--run-id": flags.run_id, "--output": flags.output, "--dry-run": dry_run})
        refuse_with("--resume", {"--new": new, "--request": request})
    seconds = None
    if preempt_after is not None:
        from launcher.cli.ui.text import flag_seconds

        seconds = flag_seconds(preempt_after, "--preempt-after")
    if request:
        if docker and code:
            raise UsageError("--code cannot be combined with --docker", "The image contains its own code.")
        run_request(request, spec, code, in_place, flags, dry_run, seconds, docker, python, output_format)
    elif code:
        raise UsageError("--code requires --request", "In a spec, image.code sets the code folder.")
    else:
        run_spec(spec, flags, dry_run, new, resume, last, seconds, docker, python, in_place, setup, output_format)


def check_start(dry_run: bool, new: bool, preempt_after: str | None, flags: Flags, request: Path | None) -> None:
    """Check combinations of flags. Raises UsageError."""
    if dry_run and (preempt_after is not None or new):
        flag = "--new" if new else "--preempt-after"
        raise UsageError(f"{flag} cannot be combined with --dry-run", "Remove one of them.")
    if new and flags.run_id is not None:
        raise UsageError("--run-id cannot be combined with --new", "--new chooses the run ID. Remove one of them.")
    if new and request:
        raise UsageError("--new cannot be combined with --request", "To run it again, use another folder: --output DIR")


def run_request(
    path: Path,
    spec: Path | None,
    code: Path | None,
    in_place: bool,
    flags: Flags,
    dry_run: bool,
    preempt_after: float | None,
    docker: bool,
    python: str | None,
    output_format: Output,
) -> None:
    """Run a request from a file, or with `dry_run` show it."""
    from launcher.cli.flows import request_file

    body, folder = request_file.load_request(path, spec, flags), request_file.folder(code)
    if dry_run:
        request_file.show_request(body, output_format, docker=docker)
        return
    from launcher.cli.flows.run_local import run_here  # Windows lacks what it needs
    from launcher.inputs.code_files import collect_code, without_secrets
    from launcher.runs.local_run import local_job, python_of_request
    from launcher.services.local.workdirs import Code

    code_sent = without_secrets(collect_code(folder) if folder else [])
    job = local_job(
        body,
        Code(code_sent.files, folder if in_place else None),
        code_sent.content.digest if folder else "",
        python=None if docker else python_of_request(body, python, os.environ),
        preempt_after=preempt_after,
        docker=docker,
    )
    run_here(job, output_format)


def run_spec(
    spec: Path | None,
    flags: Flags,
    dry_run: bool,
    new: bool,
    resume: str | None,
    last: bool,
    preempt_after: float | None,
    docker: bool,
    python: str | None,
    in_place: bool,
    setup: bool,
    output_format: Output,
) -> None:
    """Plan a spec and run it, or with `dry_run` show the plan."""
    from launcher.cli.flows.suggestions import Typed
    from launcher.cli.ui.plan_page import show_plan
    from launcher.cli.ui.streams import say
    from launcher.inputs.interpreter import answers
    from launcher.inputs.planning import planned
    from launcher.services.local.attempts import earlier_python
    from launcher.services.local.on_host import run_setup

    folder = None
    if resume:
        from launcher.runs.local_resume import find_local

        folder = find_local(resume, last=last)
    options: dict[str, Any] = {"in_place": in_place, "docker": docker, "python": python, "setup": setup}
    options["dry_run"] = dry_run
    inputs = inputs_of(folder, spec, flags, options)
    if docker:
        inputs = for_this_machine(inputs)
    plan = planned(inputs)
    earlier = "" if new else earlier_python(plan.run_folder)
    if inputs.python and not inputs.python.is_named and earlier not in ("", inputs.python.path):
        options["earlier_python"] = earlier
        inputs = inputs_of(folder, spec, flags, options)
        plan = planned(inputs)
    if setup:
        if not inputs.spec.image.setup:
            raise UsageError("--setup: the spec has no image.setup", "Remove --setup.")
        python_path = inputs.python.path if inputs.python else sys.executable
        run_setup(inputs.spec.image.setup, inputs.code or Path.cwd(), os.environ, say, python_path)
        answers.cache_clear()
        inputs = inputs_of(folder, spec, flags, options)  # the lines may have installed packages, and written code
        plan = planned(inputs)
    if dry_run:
        suggest_resume(plan, inputs)
        show_plan(plan, inputs.spec, output_format, image=docker, python=inputs.python)
        return
    # From here on: Windows, which shows plans, lacks what it needs.
    from launcher.cli.flows.run_local import run_here
    from launcher.runs.local_run import local_job
    from launcher.services.local.workdirs import Code

    if inputs.python and inputs.python.error:
        raise inputs.python.error
    with inputs.located.naming_places():
        check_runs_here(inputs, docker=docker)
    if new:
        plan = as_new_run(plan, inputs)
    report_start(plan, inputs, folder, is_new=new)
    image = None
    if docker:
        plan, image = with_local_image(plan, inputs)
    job = local_job(
        plan.attempts[0].request,
        Code(inputs.source.code, inputs.code if in_place else None, inputs.source.installed),
        inputs.context.code.digest,
        plan=plan,
        python=None if docker else inputs.python,
        preempt_after=preempt_after,
        docker=docker,
        image=image,
    )
    run_here(job, output_format, Typed(spec, flags))


def inputs_of(folder: Path | None, spec: Path | None, flags: Flags, options: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a plan, as `gather` does with these options; for a run folder, of one that continues
    it, without a spec by its own. Raises UsageError."""
    from launcher.inputs.gather import GatherOptions, gather_data

    if folder is None:
        return gather("local", spec, flags, **options)
    from launcher.runs.local_resume import stored_plan  # only to resume: Windows lacks what it needs

    run = folder.name
    run_flags = flags._replace(run_id=run, output=str(folder.parent))
    if spec:
        return gather("local", spec, run_flags, **options)
    path = folder / runfolder.PLAN
    before = stored_plan(path)
    if before is None or (before.image and before.image.files):
        why = "has no readable plan" if before is None else "has custom code, which its folder does not contain"
        raise UsageError(f"{run} {why}", f"Add the spec: launch local SPEC --resume {run}")
    return gather_data(
        "local", before.spec, str(path), overrides(run_flags), options=GatherOptions(run_id=run, **options)
    )


def report_start(plan: Plan, inputs: Inputs, folder: Path | None, *, is_new: bool) -> None:
    """Print the plan's warnings, and what changed since the run in `folder`, which it resumes, or an unfinished run.

    Raises UsageError: the run can't continue with the plan.
    """
    from launcher.cli.ui.streams import say
    from launcher.runs.local_resume import check_repeated

    if inputs.python and inputs.python.note:
        say(inputs.python.note)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    if folder:
        report_changes(folder, plan, inputs)
    elif not is_new:
        check_repeated(plan, is_builtin=inputs.spec.run.is_builtin)
        suggest_resume(plan, inputs)


def suggest_resume(plan: Plan, inputs: Inputs) -> None:
    """Print how to continue an unfinished run whose code alone has changed."""
    if sys.platform != "win32" and Path(plan.run_folder or "gs://").parent.is_dir():  # Windows lacks what it needs
        from launcher.cli.ui.streams import say
        from launcher.runs.local_resume import find_unfinished

        if hint := find_unfinished(plan, inputs.source.code):
            say(hint)


def report_changes(folder: Path, plan: Plan, inputs: Inputs) -> None:
    """Print what a resume changes. Raises UsageError: the run can't continue with it."""
    from launcher.cli.ui.streams import say
    from launcher.runs.local_resume import changed_settings, stored_plan

    before = stored_plan(folder / runfolder.PLAN)
    fix = "Without --resume, the command starts a separate run."
    for line in changed_settings(folder.name, before, plan, is_builtin=inputs.spec.run.is_builtin, fix=fix):
        say(f"resuming with {line.removeprefix('run.config.')}")


GPU_ONLY = {"precision": ("fp16", "tf32"), "attention": ("efficient", "cudnn")}
"""Values of `run.config` that need a GPU."""


def check_runs_here(inputs: Inputs, *, docker: bool) -> None:
    """Refuse an entrypoint that only the image has, and if this machine has no GPU, precisions and attention kernels
    that need one. Raises UsageError."""
    from launcher.services.local.on_host import visible_gpus

    run = inputs.spec.run
    if run.node == "none" and not docker:
        raise UsageError(
            "run.node: none starts the image's own entrypoint, which only the image has",
            "Run it in a container: --docker",
            field="run.node",
        )
    for key, kinds in GPU_ONLY.items() if run.is_builtin else ():
        if (value := run.config.get(key)) in kinds and not visible_gpus(os.environ):
            raise UsageError(
                f"run.config.{key}: {value} needs a GPU, and this machine has none",
                f"To run on the CPU: --set run.config.{key}=auto",
                field=f"run.config.{key}",
            )


def for_this_machine(inputs: Inputs) -> Inputs:
    """Return the inputs with the CPU build of PyTorch if this machine has no GPU: it is gigabytes smaller."""
    import msgspec

    from launcher.services.local.on_host import visible_gpus

    image = inputs.spec.image
    if image.uri or image.wheel or visible_gpus(os.environ):
        return inputs
    spec = msgspec.structs.replace(inputs.spec, image=msgspec.structs.replace(image, wheel="cpu"))
    return msgspec.structs.replace(inputs, spec=spec)


def with_local_image(plan: Plan, inputs: Inputs) -> tuple[Plan, str]:
    """Build or pull the plan's image; return the plan and the image's name in the local engine. Raises LaunchError."""
    from launcher.cli.ui.progress_bars import progress, report_to
    from launcher.images import pipeline
    from launcher.plan.build import with_digest
    from launcher.runs.image import image_build_request

    with progress() as bars:
        image = pipeline.image_in_engine(image_build_request(inputs), os.environ, report_to(bars))
    return (with_digest(plan, image.reference) if "@" in image.reference else plan), image.reference


def as_new_run(plan: Plan, inputs: Inputs) -> Plan:
    """Return the plan of the same job under the next free run ID."""
    import msgspec

    from launcher.inputs.planning import planned
    from launcher.services.local.run_folder import new_run

    run = new_run(plan.run, plan.run_folder or "")
    return planned(msgspec.structs.replace(inputs, context=msgspec.structs.replace(inputs.context, run_id=run)))
