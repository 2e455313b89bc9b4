"""`launch local`: run the rendered Vertex AI request on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from msgspec.structs import replace

from launch_train import runfolder
from launcher.cli.flows.suggestions import Typed
from launcher.cli.help_page import OUTPUT, RUN, option
from launcher.cli.options import (
    Flags,
    Output,
    OutputFormat,
    ResumeLast,
    SpecFile,
    flags_of,
    gather,
    overrides,
    time_option,
)
from launcher.cli.ui.plan_page import NO_IMAGE, TARGETS, show_plan
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import WIDTH, labelled, wrapped
from launcher.errors import UsageError, refuse_with
from launcher.inputs.code_files import collect_code, without_secrets
from launcher.inputs.gather import GatherOptions, Inputs, full_path, gather_data
from launcher.inputs.interpreter import answers
from launcher.inputs.planning import planned
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.plan.yaml_text import as_yaml
from launcher.services.local.attempts import earlier_python
from launcher.services.local.on_host import run_setup, visible_gpus
from launcher.services.local.request import HINT, parse_request, rebased
from launcher.services.local.workdirs import Code
from launcher.text import plural


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
        float | None,
        time_option(RUN, "--preempt-after", "Preempt the job after this time (15s), then restart it."),
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
    line = CommandLine(
        spec=spec,
        flags=flags_of(ctx),
        request=request,
        code=code,
        in_place=in_place,
        new=new,
        resume=resume,
        last=last,
        preempt_after=preempt_after,
        setup=setup,
        docker=docker,
        python=python,
        dry_run=dry_run,
    )
    line.check()
    if request:
        body, folder = load_request(request, spec, line.flags), code_folder(code)
        if dry_run:
            show_request(body, output_format, docker=docker)
        else:
            run_request(line, body, folder, output_format)
        return
    if resume:
        from launcher.runs.local_resume import find_local  # Windows lacks what it needs, as in `run_plan`

        line = line._replace(folder=find_local(resume, last=last))
    inputs, plan = planned_line(line)
    if dry_run:
        suggest_resume(plan, inputs)
        show_plan(plan, inputs.spec, output_format, image=docker, python=inputs.python)
    else:
        run_plan(line, inputs, plan, output_format)


class CommandLine(NamedTuple):
    """The arguments of the command."""

    spec: Path | None
    flags: Flags
    request: Path | None
    code: Path | None
    in_place: bool
    new: bool
    resume: str | None
    last: bool
    preempt_after: float | None
    setup: bool
    docker: bool
    python: str | None
    dry_run: bool
    folder: Path | None = None
    """The folder of the run to resume."""

    def check(self) -> None:
        """Check combinations of flags. Raises UsageError."""
        if self.dry_run and (self.preempt_after is not None or self.new):
            flag = "--new" if self.new else "--preempt-after"
            raise UsageError(f"{flag} cannot be combined with --dry-run", "Remove one of them.")
        if self.new and self.flags.run_id is not None:
            raise UsageError("--run-id cannot be combined with --new", "--new chooses the run ID. Remove one of them.")
        if self.new and self.request:
            raise UsageError(
                "--new cannot be combined with --request", "To run it again, use another folder: --output DIR"
            )
        if self.docker:
            hint = "The image has its own code and its own Python."
            refuse_with("--docker", {"--in-place": self.in_place, "--python": self.python}, hint)
        for flag, value in {"--docker": self.docker, "--dry-run": self.dry_run, "--request": self.request}.items():
            if self.setup and value:
                hint = "The image contains what the setup does." if self.docker else "Remove one of them."
                raise UsageError(f"--setup cannot be combined with {flag}", hint)
        if self.last and not self.resume:
            raise UsageError("--last requires --resume", "Name the run: --resume NAME --last")
        if self.resume is not None:
            others = {"--run-id": self.flags.run_id, "--output": self.flags.output, "--dry-run": self.dry_run}
            refuse_with("--resume", {**others, "--new": self.new, "--request": self.request})
        if self.code and (self.docker or not self.request):
            if self.request:
                raise UsageError("--code cannot be combined with --docker", "The image contains its own code.")
            raise UsageError("--code requires --request", "In a spec, image.code sets the code folder.")


def run_request(line: CommandLine, body: dict[str, Any], folder: Path | None, output: Output) -> None:
    from launcher.cli.flows.run_local import run_here
    from launcher.runs.local_run import local_job, python_of_request

    code = without_secrets(collect_code(folder) if folder else [])
    job = local_job(
        body,
        Code(code.files, folder if line.in_place else None),
        code.content.digest if folder else "",
        python=None if line.docker else python_of_request(body, line.python, os.environ),
        preempt_after=line.preempt_after,
        docker=line.docker,
    )
    run_here(job, output)


def planned_line(line: CommandLine) -> tuple[Inputs, Plan]:
    """Return the inputs and the plan of a job. With --setup, the lines of image.setup have run."""
    inputs = inputs_of(line)
    plan = planned(inputs)
    options = {}
    earlier = "" if line.new else earlier_python(plan.run_folder)
    if inputs.python and not inputs.python.is_named and earlier not in ("", inputs.python.path):
        options["earlier_python"] = earlier
        inputs = inputs_of(line, **options)
        plan = planned(inputs)
    if line.setup:
        if not inputs.spec.image.setup:
            raise UsageError("--setup: the spec has no image.setup", "Remove --setup.")
        python_path = inputs.python.path if inputs.python else sys.executable
        run_setup(inputs.spec.image.setup, inputs.code or Path.cwd(), os.environ, say, python_path)
        answers.cache_clear()
        inputs = inputs_of(line, **options)  # the lines may have installed packages, and written code
        plan = planned(inputs)
    return inputs, plan


def inputs_of(line: CommandLine, **options: Any) -> Inputs:
    """Return the inputs of a plan; without a spec, a run that is resumed has that of its own plan. `options` are those
    of `gather`. Raises UsageError."""
    options |= {name: getattr(line, name) for name in ("in_place", "docker", "python", "setup", "dry_run")}
    flags = line.flags
    if line.folder:
        flags = flags._replace(run_id=line.folder.name, output=str(line.folder.parent))
    if line.spec or not line.folder:
        return for_this_machine(gather("local", line.spec, flags, **options), docker=line.docker)
    from launcher.runs.local_resume import stored_plan  # only to resume: Windows lacks what it needs

    path = line.folder / runfolder.PLAN
    before = stored_plan(path)
    if before is None or (before.image and before.image.files):
        why = "has no readable plan" if before is None else "has custom code, which its folder does not contain"
        run = line.folder.name
        raise UsageError(f"{run} {why}", f"Add the spec: launch local SPEC --resume {run}")
    gathered = GatherOptions(run_id=line.folder.name, **options)
    inputs = gather_data("local", before.spec, str(path), overrides(flags), options=gathered)
    return for_this_machine(inputs, docker=line.docker)


def run_plan(line: CommandLine, inputs: Inputs, plan: Plan, output: Output) -> None:
    """Run a planned job. Windows, which shows plans, lacks what it needs."""
    from launcher.cli.flows.run_local import run_here
    from launcher.runs.local_run import local_job
    from launcher.services.local.run_folder import new_run

    if inputs.python and inputs.python.error:
        raise inputs.python.error
    with inputs.located.naming_places():
        check_runs_here(inputs, docker=line.docker)
    if line.new:
        run = new_run(plan.run, plan.run_folder or "")
        plan = planned(replace(inputs, context=replace(inputs.context, run_id=run)))
    report_start(plan, inputs, line.folder, is_new=line.new)
    image = None
    if line.docker:
        plan, image = with_local_image(plan, inputs)
    job = local_job(
        plan.attempts[0].request,
        Code(inputs.source.code, inputs.code if line.in_place else None, inputs.source.installed),
        inputs.context.code.digest,
        plan=plan,
        python=None if line.docker else inputs.python,
        preempt_after=line.preempt_after,
        docker=line.docker,
        image=image,
    )
    run_here(job, output, Typed(line.spec, line.flags))


def report_start(plan: Plan, inputs: Inputs, folder: Path | None, *, is_new: bool) -> None:
    """Print the plan's warnings, and what changed since the run in `folder`, which it resumes, or an unfinished run.

    Raises UsageError: the run can't continue with the plan.
    """
    from launcher.runs.local_resume import changed_settings, check_repeated, stored_plan

    if inputs.python and inputs.python.note:
        say(inputs.python.note)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    if folder:
        before, fix = stored_plan(folder / runfolder.PLAN), "Without --resume, the command starts a separate run."
        for line in changed_settings(folder.name, before, plan, is_builtin=inputs.spec.run.is_builtin, fix=fix):
            say(f"resuming with {line.removeprefix('run.config.')}")
    elif not is_new:
        check_repeated(plan, is_builtin=inputs.spec.run.is_builtin)
        suggest_resume(plan, inputs)


def suggest_resume(plan: Plan, inputs: Inputs) -> None:
    """Print how to continue an unfinished run whose code alone has changed."""
    if sys.platform != "win32" and Path(plan.run_folder or "gs://").parent.is_dir():  # Windows lacks what it needs
        from launcher.runs.local_resume import find_unfinished

        if hint := find_unfinished(plan, inputs.source.code):
            say(hint)


GPU_ONLY = {"precision": ("fp16", "tf32"), "attention": ("efficient", "cudnn")}
"""Values of `run.config` that need a GPU."""


def check_runs_here(inputs: Inputs, *, docker: bool) -> None:
    """Refuse an entrypoint that only the image has, and if this machine has no GPU, precisions and attention kernels
    that need one. Raises UsageError."""
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


def for_this_machine(inputs: Inputs, *, docker: bool) -> Inputs:
    """Return the inputs, for a container with the CPU build of PyTorch if this machine has no GPU: it is gigabytes
    smaller."""
    image = inputs.spec.image
    if not docker or image.uri or image.wheel or visible_gpus(os.environ):
        return inputs
    return replace(inputs, spec=replace(inputs.spec, image=replace(image, wheel="cpu")))


def with_local_image(plan: Plan, inputs: Inputs) -> tuple[Plan, str]:
    """Build or pull the plan's image; return the plan and the image's name in the local engine. Raises LaunchError."""
    from launcher.cli.ui.progress_bars import progress, report_to
    from launcher.images import pipeline
    from launcher.runs.image import image_build_request

    with progress() as bars:
        image = pipeline.image_in_engine(image_build_request(inputs), os.environ, report_to(bars))
    return (with_digest(plan, image.reference) if "@" in image.reference else plan), image.reference


WRITE = "A dry run writes one: launch vertex SPEC --dry-run -o json"
ALLOWED = frozenset({"output"})
"""The spec flags that are allowed with a request."""


def load_request(path: Path, spec: Path | None, flags: Flags) -> dict[str, Any]:
    """Return the request in a file, or the first request of a plan; `--output` moves its run folder.

    Raises UsageError: the file is not the JSON of a CustomJob, or a spec or a spec flag is given too.
    """
    extra = [f"the spec {spec}"] if spec else []
    for name, value in flags._asdict().items():
        if value != flags._field_defaults[name] and name not in ALLOWED:
            extra.append(f"--{name.replace('_', '-')}")
    if extra:
        raise UsageError(f"{extra[0]} cannot be combined with --request", "Edit the request instead, or plan a spec.")
    try:
        request = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read --request {path}: {error.strerror}", WRITE) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read --request {path} as JSON: {error}", WRITE) from error
    if not isinstance(request, dict):
        raise UsageError(f"--request {path} is not a JSON object", HINT)
    match request:
        case {"attempts": [{"request": dict(first)}, *_]}:  # a whole plan, as -o json prints it
            request = first
    match request:
        case {"host": str(), "job": dict(job)}:  # for a host
            request = {**job, "labels": request["labels"]}
    parse_request(request)
    return rebased(request, full_path(flags.output)) if flags.output else request


def code_folder(code: Path | None) -> Path | None:
    """Return the full path of `--code`. Raises UsageError: it is not a folder."""
    if code is None:
        return None
    if not code.is_dir():
        raise UsageError(
            f"--code {code} is not a folder", "--code takes the folder with your code, as the image would contain it."
        )
    return code.resolve()


def show_request(request: dict[str, Any], output: Output, *, docker: bool = False) -> None:
    if output is Output.json:
        print(json.dumps({"request": request}, indent=2, ensure_ascii=False))
    elif output is Output.yaml:
        print(f"# The CustomJob that launch local runs.\n{as_yaml(request)}")
    else:
        print("\n".join(request_lines(request, docker)))


def request_lines(request: dict[str, Any], docker: bool) -> Iterator[str]:
    """Yield a summary of the request, in at most 80 columns."""
    job = parse_request(request)
    yield from wrapped(f"{job.name or 'a request without a name'}  on {TARGETS['local']}", WIDTH)
    yield ""
    for number, pool in enumerate(job.pools):
        count, gpus = pool.replica_count, pool.machine_spec.accelerator_count
        each = f"{plural(gpus, 'GPU')}{' each' if count > 1 else ''}" if gpus else "no GPUs"
        container = pool.container_spec
        command = shlex.join((*container.command, *container.args)) or "the image's entrypoint"
        yield from labelled(f"pool {number}", f"{plural(count, 'replica')}, {each}: {command}")
    for image in job.images if docker else [NO_IMAGE]:
        yield from labelled("image", image)
    yield from labelled("output", job.run_folder or "none")
    yield ""
    yield "Nothing was started."
