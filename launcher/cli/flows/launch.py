"""Launch a spec as a run in the cloud, or resume a run, and follow it to its end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace as with_field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launcher.cli.flows import follow
from launcher.cli.flows.cloud import CloudContext, of_project
from launcher.cli.flows.find_run import RUN_ID, NoSuchRun, find_jobs, one_run, searched
from launcher.cli.flows.plan import planned
from launcher.cli.gather import Inputs, gather, project
from launcher.cli.options import Flags, Output, words
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.text import flag_seconds
from launcher.errors import NotAuthorised, UsageError
from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL
from launcher.plan.build import with_digest
from launcher.plan.cpu import on_cpu
from launcher.plan.model import Target
from launcher.runs.identity import identity_of

if TYPE_CHECKING:
    from launcher.plan.model import Plan


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """How to launch a run."""

    detach: bool = False
    watch_seconds: str | None = None
    builder: str = "auto"
    preflight: bool = True
    target: Target = "vertex"
    inputs: Callable[[Path | None, Flags], Inputs] = partial(gather, "vertex")
    """Gathers the inputs of a plan from a spec and flags. Raises SpecError, UsageError."""
    create_repository: bool = False
    cpu_machine: str | None = None
    """A machine type without GPUs in place of the plan's."""

    @property
    def seconds(self) -> float | None:
        """Return how long to watch. Raises UsageError."""
        return None if self.watch_seconds is None else flag_seconds(self.watch_seconds, "--watch-for")


def launch_or_resume(
    spec: Path | None, flags: Flags, options: LaunchOptions, output: Output, *, resume: str | None, new: bool
) -> None:
    """Launch a spec, or resume the run `resume`. Raises LaunchError."""
    if resume:
        resume_run(resume, spec, flags, options, output)
    else:
        launch_spec(spec, flags, options, output, new=new)


def launch_spec(spec: Path | None, flags: Flags, options: LaunchOptions, output: Output, *, new: bool) -> None:
    """Plan a spec and follow its run to its end. Raises LaunchError."""
    seconds = options.seconds
    inputs = options.inputs(spec, flags)
    made = planned(inputs)
    made = on_cpu(made, options.cpu_machine) if options.cpu_machine else made
    cloud = of_project(inputs.context.project)
    follow.check_output(made, cloud)
    if new:
        made = as_fresh_run(made, inputs, cloud)
    report_warnings(made)
    ready = image_preparer(inputs, options, cloud)
    follow.follow(cloud, made, output, ready=ready, fresh=True, detach=options.detach, watch_seconds=seconds)


def resume_run(name: str, spec: Path | None, flags: Flags, options: LaunchOptions, output: Output) -> None:
    """Resume a run that has ended, in its folder and with its image. Raises LaunchError.

    Without a spec, uses the plan in the run's folder.
    """
    seconds = options.seconds
    cloud = of_project(project(options.target, os.environ))
    if spec:
        run_id = run_id_of(name, flags, cloud)
        inputs = options.inputs(spec, with_field(flags, run_id=run_id))
        made, ready = planned(inputs), image_preparer(inputs, options, cloud)
        follow.check_output(made, cloud)
        check_run_exists(made, cloud)
    elif typed := [*words(with_field(flags, region=None)), *(["--output"] if flags.output is not None else [])]:
        raise UsageError(
            f"{typed[0]} requires a spec: --resume without one repeats the run's own plan",
            "Add the spec: launch … SPEC --resume RUN …",
        )
    else:
        run = one_run(cloud, name, searched(flags.region))
        made, ready = follow.stored_plan(cloud, run), follow.with_its_own_image
    follow.follow(
        cloud, made, output, ready=ready, fresh=True, resume=True, detach=options.detach, watch_seconds=seconds
    )


def run_id_of(name: str, flags: Flags, cloud: CloudContext) -> str:
    """Return the run's ID. If only the run's folder is left, `name` must be the ID."""
    if RUN_ID.fullmatch(name):
        return name
    try:
        return one_run(cloud, name, searched(flags.region)).id
    except NoSuchRun:
        return name


def after_preflight(made: Plan, cloud: CloudContext, options: LaunchOptions) -> Plan:
    """Return the plan after the preflight checks (VMs only). Raises PlanRefused."""
    if options.target != "vm" or not options.preflight:
        return made
    from launcher.cli.flows.preflight import preflight

    return preflight(made, cloud.compute, EventPrinter(made).say)


def check_run_exists(made: Plan, cloud: CloudContext) -> None:
    """Check that the run to resume was launched before. Raises UsageError."""
    found = find_jobs(cloud, f'labels.{RUN_LABEL}="{made.run}"', searched(None))
    if not found.jobs and is_free(made, made.run, cloud):
        raise UsageError(f"no run {made.run} to resume", "launch status lists the runs.")


def as_fresh_run(made: Plan, inputs: Inputs, cloud: CloudContext) -> Plan:
    """Return the plan under the next free run ID, or under the ID of its newest fresh run while that is active."""
    identity = identity_of(made.attempts[0])
    found = find_jobs(cloud, f'labels.{IDENTITY_LABEL}="{identity}"', searched(None))
    same = (job for job in reversed(found.jobs) if job.labels.get(IDENTITY_LABEL) == identity)
    newest = {number_of(job.run, made.run): job for job in same}
    newest.pop(0, None)  # set by --run-id
    number = max(newest, default=0)
    if number < 2 or newest[number].is_over:
        beside = [job for job in newest.values() if not job.is_over]
        for job in beside:
            EventPrinter(made).say(f"{job.run} is {job.state} in {job.place}; starting another run beside it")
        number = next(one for one in count(number + 1) if is_free(made, numbered_id(made.run, one), cloud))
    run_id = numbered_id(made.run, number)
    return planned(inputs._replace(context=replace(inputs.context, run_id=run_id)))


def is_free(made: Plan, run: str, cloud: CloudContext) -> bool:
    """Return whether the folder of run `run`, beside the plan's, has no attempts."""
    from launcher.runs.ledger import BucketLedger

    beside = (made.run_folder or "").rpartition("/")[0]
    folder = f"{beside}/{run}"
    region = made.attempts[0].region
    return not beside or not BucketLedger.open(folder, cloud.clock, project=cloud.project, region=region).entries()


def numbered_id(run: str, number: int) -> str:
    """Return RUN, RUN-2, RUN-3 …"""
    return run if number == 1 else f"{run}-{number}"


def number_of(run: str, first: str) -> int:
    """Return 1 for the run itself, N for RUN-N, 0 for anything else."""
    found = re.fullmatch(rf"{re.escape(first)}(?:-(\d+))?", run)
    return int(found[1] or 1) if found else 0


def report_warnings(made: Plan) -> None:
    """Print the plan's warnings to stderr."""
    say = EventPrinter(made).say
    for warning in made.warnings:
        say(warning)


def image_preparer(inputs: Inputs, options: LaunchOptions, cloud: CloudContext) -> Callable[[Plan], Plan]:
    """Return the function that runs the preflight checks and pushes the image, called just before a job is created."""

    def ready(made: Plan) -> Plan:
        from launcher.cli.flows.image import create, wanted
        from launcher.cli.ui.progress_bars import progress, report
        from launcher.images import pipeline

        made = after_preflight(made, cloud, options)
        job = wanted(inputs, options.builder)
        with progress() as bars:
            if options.create_repository:
                create(job, bars.line)
            try:
                found = pipeline.push(job, os.environ, report(bars))
            except NotAuthorised as error:
                if not job.image.pinned:
                    raise
                bars.line(f"cannot check that {job.image.uri} exists: {error.problem}")
                return made
            bars.line(f"image {found.reference}" + (" (already exists)" if found.how == "there" else ""))
        return with_digest(made, found.reference)

    return ready
