"""Launch a spec as a run in the cloud, or resume a run, and follow it to its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm_cost import confirmation
from launcher.cli.flows.find_run import not_a_run, several
from launcher.cli.flows.find_sweep import find_named, may_be_sweep
from launcher.cli.flows.plan import gather
from launcher.cli.flows.run_end import show_begun, show_end, show_gone, show_job
from launcher.cli.options import Flags, Output, words
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.text import flag_seconds
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.inputs.gather import Inputs, project_of
from launcher.inputs.planning import planned
from launcher.jobs.job import RUN_ID, Job
from launcher.plan.cpu import on_cpu
from launcher.plan.model import Plan, Target
from launcher.runs.cost_limit import is_limited, is_limited_plan
from launcher.runs.endings import RunEnded, RunSucceeded
from launcher.runs.find import FoundRun, NoSuchRun, look_up, only_one, searched
from launcher.runs.identity_check import AllowedChange
from launcher.runs.launching import (
    RunWatcher,
    allowed_change,
    as_fresh_run,
    check_output,
    check_run_exists,
    checked_plan,
    open_driver,
    report_change,
    stored_plan,
    watch_job,
    with_image,
    with_its_own_image,
)
from launcher.signals import Stopped, signals_stop

if TYPE_CHECKING:
    from launcher.runs.cloud import CloudContext


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """Options of a launch: image builder, preflight checks, service, and how long to watch."""

    detach: bool = False
    watch_seconds: str | None = None
    builder: str = "auto"
    preflight: bool = True
    target: Target = "vertex"
    inputs: Callable[[Path | None, Flags], Inputs] = partial(gather, "vertex")
    """Gathers the inputs of a plan from a spec and flags. Raises SpecError, UsageError."""
    create_repository: bool = False
    offline: bool = False
    """Use the prices shipped with launch."""
    yes: bool = False
    """Submit without the question about the cost."""
    last: bool = False
    """Resume the newest of several runs with the name."""
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
    made = planned(inputs, offline=options.offline)
    made = on_cpu(made, options.cpu_machine) if options.cpu_machine else made
    cloud = of_project(inputs.context.project)
    check_output(made, cloud)
    if new:
        made = as_fresh_run(made, inputs, cloud, EventPrinter(made).say)
    say = EventPrinter(made).say
    for warning in made.warnings:
        say(warning)
    follow(
        cloud,
        made,
        output,
        ready=image_preparer(inputs, options, cloud),
        confirm=confirmation(limited=is_limited(inputs), yes=options.yes, say=EventPrinter(made).say),
        fresh=True,
        detach=options.detach,
        watch_seconds=seconds,
    )


def resume_run(name: str, spec: Path | None, flags: Flags, options: LaunchOptions, output: Output) -> None:
    """Resume a run that has ended, in its folder and with its image. Raises LaunchError.

    Without a spec, uses the plan in the run's folder.
    """
    seconds = options.seconds
    cloud = of_project(project_of(spec, options.target))
    if spec:
        run_id = run_id_of(name, flags, cloud, last=options.last)
        inputs = options.inputs(spec, flags._replace(run_id=run_id))
        made, ready = planned(inputs, offline=options.offline), image_preparer(inputs, options, cloud)
        limited = is_limited(inputs)
        check_output(made, cloud)
        check_run_exists(made, cloud)
        allowed = allowed_change(made, inputs, cloud)
        report_change(allowed, inputs, EventPrinter(made).say)
    elif typed := [*words(flags._replace(region=None)), *(["--output"] if flags.output is not None else [])]:
        raise UsageError(
            f"{typed[0]} requires a spec: --resume without one repeats the run's own plan",
            "Add the spec: launch … SPEC --resume RUN …",
        )
    else:
        run = run_to_resume(name, flags, cloud, last=options.last)
        made, ready, allowed = stored_plan(cloud, run), with_its_own_image, None
        limited = is_limited_plan(made)
    follow(
        cloud,
        made,
        output,
        ready=ready,
        confirm=confirmation(limited=limited, yes=options.yes, say=EventPrinter(made).say),
        fresh=True,
        resume=True,
        allowed=allowed,
        detach=options.detach,
        watch_seconds=seconds,
    )


def run_id_of(name: str, flags: Flags, cloud: CloudContext, *, last: bool) -> str:
    """Return the run's ID. If only the run's folder is left, `name` must be the ID."""
    if RUN_ID.fullmatch(name):
        return name
    try:
        return run_to_resume(name, flags, cloud, last=last).id
    except NoSuchRun:
        return name


def run_to_resume(name: str, flags: Flags, cloud: CloudContext, *, last: bool) -> FoundRun:
    """Return the only matching run. Raises UsageError: there is none, several match, or it is a sweep's name."""
    try:
        runs = look_up(cloud, name, searched(flags.region))
    except NoSuchRun:
        if may_be_sweep(name) and (sweep := find_named(name, flags.region)):
            raise not_a_run(sweep) from None
        raise
    if found := runs[0] if last else only_one(runs):
        return found
    raise several(name, (), runs, can_take_last=True)


def after_preflight(made: Plan, cloud: CloudContext, options: LaunchOptions) -> Plan:
    """Return the plan without the placements that the preflight checks refuse. Raises PlanRefused: none is left."""
    if not options.preflight:
        return made
    from launcher.cli.flows.preflight import preflight

    compute = cloud.compute if options.target == "vm" else None
    return preflight(made, compute, EventPrinter(made).say, creates_repository=options.create_repository)


def image_preparer(inputs: Inputs, options: LaunchOptions, cloud: CloudContext) -> Callable[[Plan], Plan]:
    """Return the function that runs the preflight checks and pushes the image, called just before a job is created."""

    def ready(made: Plan) -> Plan:
        from launcher.cli.ui.progress_bars import progress, report
        from launcher.runs.image import check_contents, create, image_build_request

        made = after_preflight(made, cloud, options)
        job = image_build_request(inputs, options.builder)
        with progress() as bars:
            if options.preflight:
                check_contents(inputs, job.image, os.environ, bars.line)
            if options.create_repository:
                create(job, bars.line)
            return with_image(made, job, report(bars))

    return ready


def follow(
    cloud: CloudContext,
    made: Plan,
    output: Output,
    *,
    ready: Callable[[Plan], Plan],
    confirm: Callable[[Plan], None] = lambda _plan: None,
    fresh: bool,
    resume: bool = False,
    allowed: AllowedChange | None = None,
    detach: bool = False,
    watch_seconds: float | None = None,
) -> None:
    """Follow a plan's run to its end and print its result. Raises LaunchError: see `drive`."""
    printer = EventPrinter(made)
    driver, watcher = open_driver(cloud, made, printer, ready, allowed, confirm)
    with report_errors(watcher, printer, made, made.run, output):
        printer.say(f"looking for jobs of {made.run}")  # the search may take a while
        try:
            job = driver.drive(fresh=fresh, resume=resume, detach=detach, watch_seconds=watch_seconds)
        except RunSucceeded as ended:
            if fresh:  # launch follow was not asked to start anything
                printer.say(f"{ended.problem}\n{ended.hint}")
            if ended.job is None:  # Vertex AI deletes old jobs
                show_gone(made, output)
                return
            job = ended.job
        show_end(job, made, output) if job.has_ended else show_begun(job, output)


def follow_run(run: FoundRun, output: Output, *, watch_seconds: float | None = None) -> None:
    """Watch a run until it ends. Its remaining attempts are submitted only if its folder has the plan that its jobs
    were created from. Raises LaunchError; NotAuthorised if another attempt is due and the plan cannot be trusted."""
    made, refused = None, None
    if run.context.of_run(None).outlives_client:
        cloud = of_project(run.context.project)
        made, refused = checked_plan(cloud, run)
        if made and not refused:
            follow(cloud, made, output, ready=with_its_own_image, fresh=False, watch_seconds=watch_seconds)
            return
    printer = EventPrinter(None)
    if run.is_active and run.context.of_run(None).outlives_client:
        why = "has a plan that cannot be trusted" if refused else "has no readable plan"
        printer.say(f"its folder {why}; following this job only, without further attempts")
    watcher = RunWatcher(run.context, printer, run.storage)
    with report_errors(watcher, printer, None, run.id, output):
        job = watch_job(run, watcher, watch_seconds, refused)
        show_end(job, None, output)


@contextmanager
def report_errors(
    watcher: RunWatcher, printer: EventPrinter, made: Plan | None, run: str, output: Output
) -> Iterator[None]:
    """Print the state of the job on a failure, and what continues after Ctrl-C, SIGTERM or SIGHUP."""
    try:
        with signals_stop():
            yield
    except LaunchError as error:
        close_printer(printer)
        job = error.job if isinstance(error, RunEnded) else watcher.job
        if job and isinstance(error, JobFailed | RunEnded):
            show_end(job, made, output, error)
        elif job:
            show_job(job, output, error)
        raise
    except KeyboardInterrupt as stop:
        stop.add_note(interrupted_text(watcher.job, run))
        close_printer(printer, interrupted_text(watcher.job, run))
        raise
    except BrokenPipeError:  # `launch … 2>&1 | head`: the pipe is closed, so success must not be reported
        raise Stopped(signal.SIGPIPE) from None
    finally:
        close_printer(printer)


def interrupted_text(job: Job | None, run: str) -> str:
    """Return what continues after the watch was interrupted, and the commands for it."""
    if job is None:
        return f"interrupted before a job was found\nlaunch status {run} shows whether one was created"
    if job.is_over:
        return f"interrupted; its job has ended\nlaunch follow {run} shows how, or starts the next attempt"
    what = "is being cancelled" if job.state == "CANCELLING" else "continues"
    return f"stopped watching; the job {what}\nlaunch follow {run} watches it; launch cancel {run} cancels it"


def close_printer(printer: EventPrinter, text: str = "") -> None:
    """Finish the progress line and print `text`. The terminal may be closed: then nothing is printed."""
    try:
        printer.close()
        if text:
            printer.say(text)
    except OSError:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - open as long as we run
