"""Launch a spec as a run in the cloud, or resume a run, and follow it to its end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from launch_train.runfolder.starts import RunMetrics
from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm import confirm_cost
from launcher.cli.flows.find_run import ambiguous_run, find_named, may_be_sweep, not_a_run
from launcher.cli.options import Flags, Output, flag_words, gather
from launcher.cli.ui.data import job_data, run_document
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import EventPrinter, attempt_of
from launcher.cli.ui.run_summary import results_data, summary_lines
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import LABEL
from launcher.errors import JobFailed, LaunchError, UsageError
from launcher.inputs.gather import Inputs, project_of
from launcher.inputs.planning import planned
from launcher.jobs.job import GONE, RUN_ID, Job
from launcher.plan.cpu import on_cpu
from launcher.plan.model import Plan, Target
from launcher.runs.cloud import CloudContext
from launcher.runs.context import LaunchContext
from launcher.runs.cost_limit import is_limited, is_limited_plan
from launcher.runs.driver import RunDriver
from launcher.runs.endings import RunEnded, RunSucceeded
from launcher.runs.find import FoundRun, NoSuchRun, look_up, only_one, searched
from launcher.runs.follow import checked_plan, stored_plan, watch_job
from launcher.runs.run_folder import read_results, restarts, storage_of
from launcher.runs.submit import RunWatcher, SubmitOptions, image_preparer, open_driver, submission, with_its_own_image
from launcher.services import request
from launcher.signals import Stopped, signals_stop
from launcher.text import usd_text


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """Options of a launch: what it does before its first job, its service, and how long it watches."""

    detach: bool = False
    watch_seconds: float | None = None
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
    plan = driver.plan
    with report_errors(watcher, printer, plan, plan.run, output):
        printer.say(f"looking for jobs of {plan.run}")  # the search may take a while
        try:
            job = driver.drive(fresh=fresh, resume=resume, detach=options.detach, watch_seconds=options.watch_seconds)
        except RunSucceeded as ended:
            if fresh:  # launch follow was not asked to start anything
                printer.say(f"{ended.problem}\n{ended.hint}")
            if ended.job is None:  # Vertex AI deletes old jobs
                if output is not Output.text:
                    data = {"run": plan.run, "state": "SUCCEEDED", "job": None}
                    printed({**data, "results": results_data(results_of(plan.run_folder))}, output)
                return
            job = ended.job
        show_end(job, plan, output) if job.has_ended else show_begun(job, output)


def follow_run(run: FoundRun, output: Output, *, watch_seconds: float | None = None) -> None:
    """Watch a run until it ends. Its remaining attempts are submitted only if its folder has the plan that its jobs
    were created from. Raises LaunchError; NotAuthorised if another attempt is due and the plan cannot be trusted."""
    if run.job.is_missing:
        raise UsageError(f"{run.id} has no job on {run.job.region}", f"To start one: {run.job.command}")
    options, refused = LaunchOptions(watch_seconds=watch_seconds), None
    if run.context.of_run(None).outlives_client:
        cloud = cast(LaunchContext, run.context.with_notice(say))  # as its jobs outlive a launch
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
        job = watch_job(run, watcher, watch_seconds, refused)
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


ENDS = {
    "CANCELLED": "was cancelled after",
    "EXPIRED": "expired after",
    "INTERRUPTED": "was interrupted after",
    "UNKNOWN": "can't be read after",
    GONE: "was deleted after at least",
}
"""Ends that are not failures of the job itself."""


def show_job(job: Job, output: Output, error: BaseException | None = None) -> None:
    """With -o json or yaml, print the last known state of a job that still runs; `error` ends the command."""
    if output is not Output.text:
        printed(job_data(job.run, job), output, error)


def show_begun(job: Job, output: Output) -> None:
    """Print a job that continues in the background, with the commands to follow and cancel it."""
    if output is not Output.text:
        show_job(job, output)
        return
    print(f"{job.run} is {job.state} {'on' if job.target == 'on' else 'in'} {job.place}")
    causes = {"on": "a restart of the host", "vm": "a stockout or a preemption"}
    retries = "a failure of a node" if "script" in job.request else causes.get(job.target, "a stockout")
    print(f"launch follow {job.handle}\n    watches it; needed to start the next attempt after {retries}")
    print(f"launch cancel {job.run}\n    cancels it")


def show_end(
    job: Job, plan: Plan | None, output: Output, error: LaunchError | None = None, *, run: FoundRun | None = None
) -> None:
    """Print how the run ended, its results and its folder; as JSON, of a `run` whose job was watched, its status too.
    `error` is the failure that the command ends with."""
    folder = request.run_folder(job.request)
    results = results_of(folder)
    count = None
    with suppress(LaunchError):  # its folder cannot be read
        count = restarts(storage) if (storage := storage_of(folder)) else None
    seconds = max(0.0, (job.ended or job.created) - (job.started or job.ended or job.created))
    usd, planned = None, attempt_of(plan, job)
    if plan and planned and planned.usd_per_hour is not None and job.ended is not None:
        usd = planned.usd_per_hour * plan.machine.nodes * seconds / 3600
    if output is Output.text:
        how = ENDS.get(job.state, "")
        known = seconds if job.ended or not job.is_here else None  # a killed supervisor records no end
        summary = (job.run, folder, job.state == "SUCCEEDED", known, results)
        print("\n".join(summary_lines(*summary, how=how, restarts=count or 0)))
        if usd is not None:
            print(f"{'cost':{LABEL}}{usd_text(usd, approx=True)} for the machines of this attempt")
        return
    data = {"seconds": seconds, "usd": usd, "restarts": count, "results": results_data(results)}
    if run:
        ended = replace(run, jobs=(job, *(other for other in run.jobs if other.name != job.name)))
        data = {**run_document(ended), **data}
    printed({**job_data(job.run, job), **data}, output, error)


def results_of(folder: str | None) -> RunMetrics | None:
    """Return the run's metrics, or None if they cannot be read."""
    try:
        return read_results(storage_of(folder))
    except LaunchError as error:
        say(f"cannot read its metrics: {error.problem}")
        return None
