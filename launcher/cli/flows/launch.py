"""Launch a spec as a run in the cloud, or resume a run, and follow it to its end."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace as with_field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launcher.cli.flows.cloud import CloudContext, of_project
from launcher.cli.flows.find_run import RUN_ID, NoSuchRun, Run, find_jobs, one_run, searched
from launcher.cli.flows.job_view import CloudJobView
from launcher.cli.flows.plan import planned
from launcher.cli.flows.run_end import show_begun, show_end, show_gone, show_job, storage_of
from launcher.cli.gather import Inputs, gather, project
from launcher.cli.options import Flags, Output, words
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.job_text import run_folder_of
from launcher.cli.ui.text import flag_seconds
from launcher.errors import JobFailed, LaunchError, NotAuthorised, UsageError
from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL, Job, command
from launcher.plan.binding import NewerFormat
from launcher.plan.build import with_digest
from launcher.plan.cpu import on_cpu
from launcher.plan.model import Plan, Target
from launcher.runs.driver import AttemptFailed, AttemptStarted, RunDriver, end_error, ends_run
from launcher.runs.endings import RunEnded, RunSucceeded
from launcher.runs.identity import identity_of
from launcher.runs.ledger import BucketLedger, MemoryLedger
from launcher.runs.stored_plan import refusal
from launcher.signals import Stopped, signals_stop

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.backend.router import Services
    from launcher.plan.model import Plan
    from launcher.runs.ledger import Ledger
    from launcher.runs.watch.loop import Event, JobView


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
    check_output(made, cloud)
    if new:
        made = as_fresh_run(made, inputs, cloud)
    report_warnings(made)
    ready = image_preparer(inputs, options, cloud)
    follow(cloud, made, output, ready=ready, fresh=True, detach=options.detach, watch_seconds=seconds)


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
        check_output(made, cloud)
        check_run_exists(made, cloud)
    elif typed := [*words(with_field(flags, region=None)), *(["--output"] if flags.output is not None else [])]:
        raise UsageError(
            f"{typed[0]} requires a spec: --resume without one repeats the run's own plan",
            "Add the spec: launch … SPEC --resume RUN …",
        )
    else:
        run = one_run(cloud, name, searched(flags.region))
        made, ready = stored_plan(cloud, run), with_its_own_image
    follow(cloud, made, output, ready=ready, fresh=True, resume=True, detach=options.detach, watch_seconds=seconds)


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


class RunWatcher:
    """The driver's watcher: opens a view of each job and prints events. `job` is the last job seen."""

    def __init__(self, service: Services, cloud: CloudContext, printer: EventPrinter, folder: Storage | None) -> None:
        self._service, self._cloud = service, cloud
        self._printer = printer
        self._folder = folder
        self.job: Job | None = None

    def view(self, job: Job, number: int) -> JobView:
        """Return a new view of a job."""
        return CloudJobView(self._service, self._cloud, job, number, self._folder, self._printer.say)

    def report(self, event: Event | AttemptStarted | AttemptFailed) -> None:
        """Print an event."""
        self.job = getattr(event, "job", None) or self.job
        self._printer(event)

    def error_in_output(self) -> str:
        """Return the first error in the job's log lines."""
        return self._printer.error


def follow(
    cloud: CloudContext,
    made: Plan,
    output: Output,
    *,
    ready: Callable[[Plan], Plan],
    fresh: bool,
    resume: bool = False,
    detach: bool = False,
    watch_seconds: float | None = None,
) -> None:
    """Follow a plan's run to its end and print its result. Raises LaunchError: see `drive`."""
    printer = EventPrinter(made)
    folder = made.run_folder
    ledger: Ledger = MemoryLedger(cloud.clock)
    if folder:
        ledger = BucketLedger.open(
            folder, cloud.clock, printer.say, project=cloud.project, region=made.attempts[0].region
        )
    storage = storage_of(folder)
    service = cloud.of_run(storage)
    watcher = RunWatcher(service, cloud, printer, storage)
    driver = RunDriver(
        plan=made, service=service, ledger=ledger, watcher=watcher, say=printer.say, ready=ready, clock=cloud.clock
    )
    with errors_shown(watcher, printer, made, made.run, output):
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


def follow_run(cloud: CloudContext, run: Run, output: Output, *, watch_seconds: float | None = None) -> None:
    """Watch a run until it ends. Its remaining attempts are submitted only if its folder has the plan that its jobs
    were created from. Raises LaunchError; NotAuthorised if another attempt is due and the plan cannot be trusted."""
    made, refused = checked_plan(cloud, run)
    if made and not refused:
        follow(cloud, made, output, ready=with_its_own_image, fresh=False, watch_seconds=watch_seconds)
        return
    printer = EventPrinter(None)
    if run.is_active:
        why = "has a plan that cannot be trusted" if refused else "has no readable plan"
        printer.say(f"its folder {why}; following this job only, without further attempts")
    storage = storage_of(run_folder_of(run.job))
    watcher = RunWatcher(cloud.of_run(storage), cloud, printer, storage)
    with errors_shown(watcher, printer, None, run.id, output):
        job = watch_job(cloud, watcher, run.job, watch_seconds, refused)
        show_end(job, None, output)


def watch_job(
    cloud: CloudContext,
    watcher: RunWatcher,
    job: Job,
    watch_seconds: float | None,
    refused: NotAuthorised | None = None,
) -> Job:
    """Watch one job until it ends. Raises LaunchError: the job or `watch` failed; `refused` if another attempt is
    due."""
    from launcher.backend.request import tried_by
    from launcher.diagnosis import of_end
    from launcher.runs.watch.loop import watch

    watcher.report(AttemptStarted(job=job, number=0, created=False))
    view = watcher.view(job, 0)
    ended = watch(view, watcher.report, cloud.clock, wait_seconds=None, watch_seconds=watch_seconds).job
    diagnosis = of_end(ended, tried_by(ended, cloud.project), watcher.error_in_output())
    if diagnosis.kind == "succeeded":
        return ended
    if refused and not ends_run(diagnosis):
        watcher.report(AttemptFailed(job=ended, number=0, diagnosis=diagnosis))
        raise refused
    raise end_error(ended, diagnosis)


def with_its_own_image(made: Plan) -> Plan:
    """Return the plan unchanged: its image was pushed when the run was launched."""
    return made


@contextmanager
def errors_shown(
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


def stored_plan(cloud: CloudContext, run: Run) -> Plan:
    """Return the plan that a run was launched with. Raises UsageError: none exists; NotAuthorised: it isn't the
    run's."""
    made, refused = checked_plan(cloud, run)
    if refused:
        raise refused
    if made is None:
        raise UsageError(
            f"the folder of {run.id} ({run_folder_of(run.job) or 'none'}) has no readable plan",
            f"Add the spec: {command(vm=run.job.zone is not None)} --resume {run.id}",
        )
    return made


def checked_plan(cloud: CloudContext, run: Run) -> tuple[Plan | None, NotAuthorised | None]:
    """Return the plan in a run's folder (None: no readable one), and the error if it must not be submitted. Raises
    LaunchError: the records to check it against cannot be read."""
    folder = run_folder_of(run.job)
    try:
        ledger = BucketLedger.open(folder) if folder else None
        stored = ledger.stored() if ledger else None
    except NewerFormat:
        raise
    except LaunchError:
        return None, None
    if ledger is None or stored is None or stored.plan.run != run.id:
        return None, None
    made = stored.plan
    if refused := refusal(stored, run.jobs, ledger, cloud.service):
        return made, refused
    try:
        check_output(made, cloud)
    except NotAuthorised as error:
        return made, error
    return made, None


def check_output(made: Plan, cloud: CloudContext) -> None:
    """Check that the project owns the bucket if the plan writes to the default one. Raises NotAuthorised,
    UsageError."""
    from launcher.gcp.default_bucket import check_default_bucket

    if made.run_folder and not made.spec.get("output"):
        check_default_bucket(made.project, os.environ, cloud.clock, region=made.attempts[0].region)
