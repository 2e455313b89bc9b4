"""Follow a run in the cloud to its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.flows.cloud import CloudContext
from launcher.cli.flows.find_run import Run
from launcher.cli.flows.job_view import CloudJobView
from launcher.cli.flows.run_end import show_begun, show_end, show_gone, show_job, storage_of
from launcher.cli.options import Output
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.job_text import run_folder_of
from launcher.errors import JobFailed, LaunchError, NotAuthorised, UsageError
from launcher.jobs.job import Job, command
from launcher.plan.binding import NewerFormat
from launcher.plan.model import Plan
from launcher.runs.driver import AttemptFailed, AttemptStarted, RunDriver, end_error, ends_run
from launcher.runs.endings import RunEnded, RunSucceeded
from launcher.runs.ledger import BucketLedger, MemoryLedger
from launcher.runs.stored_plan import refusal
from launcher.signals import Stopped, signals_stop

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.backend.router import Services
    from launcher.runs.ledger import Ledger
    from launcher.runs.watch.loop import Event, JobView


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
