"""Launch a spec as a run in the cloud, or resume a run, and follow it to its end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec import Struct

from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm_cost import confirm_cost
from launcher.cli.flows.find_run import ambiguous_run, find_named, may_be_sweep, not_a_run
from launcher.cli.flows.run_end import show_begun, show_end, show_gone, show_job
from launcher.cli.options import Flags, Output, flag_words, gather
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import flag_seconds
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.inputs.gather import Inputs, project_of
from launcher.inputs.planning import planned
from launcher.jobs.job import RUN_ID, Job
from launcher.plan.cpu import on_cpu
from launcher.plan.model import Plan, Target
from launcher.runs.cost_limit import is_limited, is_limited_plan
from launcher.runs.driver import RunDriver
from launcher.runs.endings import RunEnded, RunSucceeded
from launcher.runs.find import FoundRun, NoSuchRun, look_up, only_one, searched
from launcher.runs.follow import checked_plan, stored_plan, watch_job
from launcher.runs.submit import RunWatcher, SubmitOptions, image_preparer, open_driver, submission, with_its_own_image
from launcher.signals import Stopped, signals_stop

if TYPE_CHECKING:
    from launcher.runs.cloud import CloudContext
    from launcher.runs.context import LaunchContext


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """Options of a launch: what it does before its first job, its service, and how long it watches."""

    detach: bool = False
    watch_seconds: str | None = None
    submit: SubmitOptions = SubmitOptions()
    target: Target = "vertex"
    inputs: Callable[[Path | None, Flags], Inputs] = partial(gather, "vertex")
    """Gathers the inputs of a plan from a spec and flags. Raises SpecError, UsageError."""
    offline: bool = False
    """Use the prices shipped with launch."""
    yes: bool = False
    """Submit without the question about the cost."""
    last: bool = False
    """Resume the newest of several runs with the name."""
    cpu_machine: str | None = None
    """A machine type without GPUs in place of the plan's."""

    def __post_init__(self) -> None:
        """Check the time to watch, before anything is sent. Raises UsageError."""
        if self.watch_seconds is not None:
            flag_seconds(self.watch_seconds, "--watch-for")

    @property
    def seconds(self) -> float | None:
        """Return how long to watch."""
        return None if self.watch_seconds is None else flag_seconds(self.watch_seconds, "--watch-for")


def launch_or_resume(
    spec: Path | None, flags: Flags, options: LaunchOptions, output: Output, *, resume: str | None, new: bool
) -> None:
    """Plan a spec and submit it, or resume the run `resume`; follow it to its end. Raises LaunchError."""
    if resume:
        resume_run(resume, spec, flags, options, output)
        return
    inputs = options.inputs(spec, flags)
    plan = planned(inputs, offline=options.offline)
    plan = on_cpu(plan, options.cpu_machine) if options.cpu_machine else plan
    submit_plan(plan, inputs, of_project(inputs.context.project), options, output, new=new)


def submit_plan(
    plan: Plan,
    inputs: Inputs,
    cloud: CloudContext,
    options: LaunchOptions,
    output: Output,
    *,
    new: bool = False,
    resume: bool = False,
) -> None:
    """Submit a plan and follow its run to its end. Raises LaunchError."""
    printer = EventPrinter(plan)
    confirm = partial(confirm_cost, limited=is_limited(inputs), yes=options.yes, say=printer.say)
    ready = image_preparer(inputs, cloud, printer, options.submit)
    driver, watcher = submission(plan, inputs, cloud, printer, ready, confirm, new=new, resume=resume)
    for warning in driver.plan.warnings if not resume else ():
        printer.say(warning)
    follow_driver(driver, watcher, printer, output, options, fresh=True, resume=resume)


def resume_run(name: str, spec: Path | None, flags: Flags, options: LaunchOptions, output: Output) -> None:
    """Resume a run that has ended, in its folder and with its image. Raises LaunchError.

    Without a spec, uses the plan in the run's folder.
    """
    cloud = of_project(project_of(spec, options.target))
    if spec:
        inputs = options.inputs(spec, flags._replace(run_id=run_id_of(name, flags, cloud, last=options.last)))
        submit_plan(planned(inputs, offline=options.offline), inputs, cloud, options, output, resume=True)
        return
    if typed := [*flag_words(flags._replace(region=None)), *(["--output"] if flags.output is not None else [])]:
        raise UsageError(
            f"{typed[0]} requires a spec: --resume without one repeats the run's own plan",
            "Add the spec: launch … SPEC --resume RUN …",
        )
    plan = stored_plan(cloud, run_to_resume(name, flags, cloud, last=options.last))
    printer = EventPrinter(plan)
    confirm = partial(confirm_cost, limited=is_limited_plan(plan), yes=options.yes, say=printer.say)
    driver, watcher = open_driver(cloud, plan, printer, with_its_own_image, confirm=confirm)
    follow_driver(driver, watcher, printer, output, options, fresh=True, resume=True)


def run_id_of(name: str, flags: Flags, cloud: CloudContext, *, last: bool) -> str:
    """Return the run's ID. If only the run's folder is left, `name` must be the ID."""
    if re.fullmatch(RUN_ID, name):
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
    if run := runs[0] if last else only_one(runs):
        return run
    raise ambiguous_run(name, (), runs, can_take_last=True)


def follow_driver(
    driver: RunDriver,
    watcher: RunWatcher,
    printer: EventPrinter,
    output: Output,
    options: LaunchOptions,
    *,
    fresh: bool,
    resume: bool = False,
) -> None:
    """Drive a run to its end and print its result. Raises LaunchError: see `RunDriver.drive`."""
    plan, seconds = driver.plan, options.seconds
    with report_errors(watcher, printer, plan, plan.run, output):
        printer.say(f"looking for jobs of {plan.run}")  # the search may take a while
        try:
            job = driver.drive(fresh=fresh, resume=resume, detach=options.detach, watch_seconds=seconds)
        except RunSucceeded as ended:
            if fresh:  # launch follow was not asked to start anything
                printer.say(f"{ended.problem}\n{ended.hint}")
            if ended.job is None:  # Vertex AI deletes old jobs
                show_gone(plan, output)
                return
            job = ended.job
        show_end(job, plan, output) if job.has_ended else show_begun(job, output)


def follow_run(run: FoundRun, output: Output, *, watch_seconds: str | None = None) -> None:
    """Watch a run until it ends. Its remaining attempts are submitted only if its folder has the plan that its jobs
    were created from. Raises LaunchError; NotAuthorised if another attempt is due and the plan cannot be trusted."""
    options, refused = LaunchOptions(watch_seconds=watch_seconds), None
    seconds = options.seconds
    if run.context.of_run(None).outlives_client:
        cloud = cast("LaunchContext", run.context.with_notice(say))  # as its jobs outlive a launch
        plan, refused = checked_plan(cloud, run)
        if plan and not refused:
            printer = EventPrinter(plan)
            driver, watcher = open_driver(cloud, plan, printer, with_its_own_image)
            follow_driver(driver, watcher, printer, output, options, fresh=False)
            return
        if run.is_active:
            why = "has a plan that cannot be trusted" if refused else "has no readable plan"
            say(f"its folder {why}; following this job only, without further attempts")
    printer = EventPrinter(None)
    tail = None if run.context.of_run(None).outlives_client else 0  # its own terminal has the lines so far
    watcher = RunWatcher(run.context, printer, run.storage, tail=tail)
    with report_errors(watcher, printer, None, run.id, output, run):
        job = watch_job(run, watcher, seconds, refused)
        show_end(job, None, output, run=run)


@contextmanager
def report_errors(
    watcher: RunWatcher,
    printer: EventPrinter,
    plan: Plan | None,
    run: str,
    output: Output,
    followed: FoundRun | None = None,
) -> Iterator[None]:
    """Print the state of the job on a failure, and what continues after Ctrl-C, SIGTERM or SIGHUP. `followed`: a run
    whose job alone is watched."""
    try:
        with signals_stop():
            yield
    except LaunchError as error:
        close_printer(printer)
        job = error.job if isinstance(error, RunEnded) else watcher.job
        if job and isinstance(error, JobFailed | RunEnded):
            show_end(job, plan, output, error, run=followed)
        elif job:
            show_job(job, output, error)
        raise
    except KeyboardInterrupt as stop:
        stop.add_note(job_interrupted_text(watcher.job, run))
        close_printer(printer, job_interrupted_text(watcher.job, run))
        if watcher.job:
            show_job(watcher.job, output, stop)
        raise
    except BrokenPipeError:  # `launch … 2>&1 | head`: the pipe is closed, so success must not be reported
        raise Stopped(signal.SIGPIPE) from None
    finally:
        close_printer(printer)


def job_interrupted_text(job: Job | None, run: str) -> str:
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
