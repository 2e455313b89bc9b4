"""Submit a plan as a run: its checks, its image, and the driver that goes from attempt to attempt."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from launcher.diagnosis.output_cause import CauseFinder
from launcher.errors import NotAuthorised
from launcher.gcp.default_bucket import check_default_bucket
from launcher.gcp.storage import open_folder
from launcher.images import pipeline
from launcher.inputs.planning import planned
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.project import preflight as project_preflight
from launcher.runs.driver import AttemptFailed, AttemptStarted, RunDriver
from launcher.runs.identity_check import AllowedChange
from launcher.runs.image import check_contents, create, image_build_request
from launcher.runs.ledger import Ledger
from launcher.runs.resume import allowed_change, check_run_exists, report_change, with_fresh_id
from launcher.runs.watch import Event, JobView, LinesPrinted, RunJobView

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.images.pipeline import ImageBuildRequest, Report
    from launcher.inputs.gather import Inputs
    from launcher.jobs.job import Job
    from launcher.project.model import Check
    from launcher.runs.cloud import CloudContext
    from launcher.runs.context import LaunchContext, RunContext

RunEvent = Event | AttemptStarted | AttemptFailed


class Events(Protocol):
    """The receiver of a run's events and of launch's messages."""

    def __call__(self, event: RunEvent) -> None:
        """Receive an event."""

    def say(self, text: str) -> None:
        """Receive a message of launch, of one or more lines."""

    def show_checks(self, checks: tuple[Check, ...]) -> None:
        """Receive the results of the preflight checks, if a placement is left."""

    def building(self) -> AbstractContextManager[Report]:
        """Return the receiver of an image's progress, for the time in which it is built and pushed."""


class SubmitOptions(Struct, frozen=True, kw_only=True):
    """What a submission does before its first job."""

    builder: str = "auto"
    """auto, append, docker or cloud-build."""
    create_repository: bool = False
    preflight: bool = True
    """Check the project first (docs/project.md)."""


def submission(
    plan: Plan,
    inputs: Inputs,
    cloud: LaunchContext,
    events: Events,
    ready: Callable[[Plan], Plan],
    confirm: Callable[[Plan], None] = lambda _plan: None,
    *,
    plan_again: Callable[[Inputs], Plan] = planned,
    new: bool = False,
    resume: bool = False,
) -> tuple[RunDriver, RunWatcher]:
    """Return the driver of a plan's run and its watcher; `new`: under the next free run ID, with `plan_again`;
    `resume`: of a run that has ended. `ready` returns the plan of a job that can be created; `confirm` accepts the
    cost, or raises.

    Raises UsageError: the output cannot be used, or there is no run to resume; NotAuthorised.
    """
    check_output(plan, cloud)
    allowed = None
    if new:
        plan = plan_again(with_fresh_id(plan, inputs, cloud, events.say))
    if resume:
        check_run_exists(plan, cloud)
        allowed = allowed_change(plan, inputs, cloud)
        report_change(allowed, inputs, events.say)
    return open_driver(cloud, plan, events, ready, allowed, confirm)


def image_preparer(
    inputs: Inputs, cloud: CloudContext, events: Events, options: SubmitOptions
) -> Callable[[Plan], Plan]:
    """Return the function that runs the preflight checks and pushes the image, called just before a job is created."""

    def ready(plan: Plan) -> Plan:
        if options.preflight:
            plan = preflight(plan, cloud, events, creates_repository=options.create_repository)
        build = image_build_request(inputs, options.builder)
        with events.building() as report:
            if options.preflight:
                check_contents(inputs, build.image, os.environ, report.line)
            if options.create_repository:
                create(build, report.line)
            return with_image(plan, build, report)

    return ready


def preflight(plan: Plan, cloud: CloudContext, events: Events, *, creates_repository: bool = False) -> Plan:
    """Return the plan without the placements that cannot work. Raises PlanRefused, NoCapacity, NotAuthorised: none is
    left."""
    show = events.show_checks
    return project_preflight.preflight(
        plan, os.environ, cloud.compute, events.say, show, creates_repository=creates_repository
    )


def with_its_own_image(plan: Plan) -> Plan:
    """Return the plan unchanged: its image was pushed when the run was launched."""
    return plan


def with_image(plan: Plan, build: ImageBuildRequest, report: Report) -> Plan:
    """Return the plan with the digest of its image, which is pushed to the registry unless it exists there.

    A pinned image that this account may not look up is used unchecked. Raises LaunchError.
    """
    try:
        pushed = pipeline.push(build, os.environ, report)
    except NotAuthorised as error:
        if not build.image.pinned:
            raise
        report.line(f"cannot check that {build.image.uri} exists: {error.problem}")
        return plan
    report.line(f"image {pushed.reference}" + (" (already exists)" if pushed.how == "there" else ""))
    base = pushed.base or pipeline.recorded_base(build.image, pushed.reference, os.environ)
    return with_digest(plan, pushed.reference, base)


def check_output(plan: Plan, cloud: LaunchContext) -> None:
    """Check that the project owns the bucket if the plan writes to the default one. Raises NotAuthorised,
    UsageError."""
    if plan.run_folder and not plan.spec.get("output"):
        check_default_bucket(plan.project, os.environ, cloud.clock, region=plan.attempts[0].region)


def open_driver(
    cloud: LaunchContext,
    plan: Plan,
    events: Events,
    ready: Callable[[Plan], Plan],
    allowed: AllowedChange | None = None,
    confirm: Callable[[Plan], None] = lambda _plan: None,
) -> tuple[RunDriver, RunWatcher]:
    """Return the driver of a plan's run, and its watcher. `ready` returns the plan with its image in the registry;
    `allowed` is the change of settings with which the run may be resumed; `confirm` accepts the cost, or raises.

    Sends no request. Raises UsageError: the run folder cannot be used; NotAuthorised: no credentials.
    """
    storage = open_folder(plan.run_folder) if plan.run_folder else None
    ledger = Ledger(storage, cloud.clock, events.say, project=cloud.project, region=plan.attempts[0].region)
    watcher = RunWatcher(cloud, events, storage)
    driver = RunDriver(
        plan=plan,
        service=cloud.of_run(storage),
        ledger=ledger,
        watcher=watcher,
        say=events.say,
        ready=ready,
        clock=cloud.clock,
        allowed=allowed,
        confirm=confirm,
    )
    return driver, watcher


class RunWatcher:
    """The driver's watcher: opens a view of each job, and passes events on. `job` is the last job seen."""

    def __init__(self, context: RunContext, events: Events, folder: Storage | None, *, tail: int | None = None) -> None:
        """`tail`: number of lines to begin with; None: all."""
        self._context, self._events, self._tail = context, events, tail
        self._folder = folder
        self._cause = CauseFinder()
        self.job: Job | None = None

    def view(self, job: Job, number: int) -> JobView:
        return RunJobView(self._context, job, number, self._folder, self._events.say, tail=self._tail)

    def report(self, event: RunEvent) -> None:
        self.job = getattr(event, "job", None) or self.job
        if isinstance(event, AttemptStarted):
            self._cause.reset()
        for line in event.lines if isinstance(event, LinesPrinted) else ():
            self._cause.add(line.replica, line.text)
        self._events(event)

    def error_in_output(self) -> str:
        """Return the cause of the job's end that its log lines name, or an empty text."""
        return str(self._cause.cause or "")
