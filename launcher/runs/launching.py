"""Submit a plan as a run and follow it, or follow a run that exists. Reports events; prints nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.config import is_resumable
from launcher.diagnosis.output_cause import CauseFinder
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.gcp.storage import open_folder
from launcher.inputs.planning import planned
from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL, Job
from launcher.plan.binding import NewerFormat
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.plan.names import compute_identity
from launcher.runs.driver import AttemptFailed, AttemptStarted, RunDriver, end_error, is_final
from launcher.runs.find import FoundRun, find_jobs, here_instead, searched
from launcher.runs.identity_check import AllowedChange, comparable_request, identity_of
from launcher.runs.ledger import Ledger
from launcher.runs.stored_plan import refusal
from launcher.runs.watch.job_view import RunJobView
from launcher.runs.watch.loop import Event, LinesPrinted
from launcher.services import request

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.images.dependency_image import ImageBuildRequest, Report
    from launcher.inputs.gather import Inputs
    from launcher.runs.cloud import CloudContext
    from launcher.runs.context import RunContext
    from launcher.runs.ledger import Ledger
    from launcher.runs.watch.loop import JobView

RunEvent = Event | AttemptStarted | AttemptFailed


class Events(Protocol):
    """The receiver of a run's events and of launch's messages."""

    def __call__(self, event: RunEvent) -> None:
        """Receive an event."""

    def say(self, text: str) -> None:
        """Receive a message of launch, of one or more lines."""


def open_driver(
    cloud: CloudContext,
    made: Plan,
    events: Events,
    ready: Callable[[Plan], Plan],
    allowed: AllowedChange | None = None,
    confirm: Callable[[Plan], None] = lambda _plan: None,
) -> tuple[RunDriver, RunWatcher]:
    """Return the driver of a plan's run, and its watcher. `ready` returns the plan with its image in the registry;
    `allowed` is the change of settings with which the run may be resumed; `confirm` accepts the cost, or raises.

    Sends no request. Raises UsageError: the run folder cannot be used; NotAuthorised: no credentials.
    """
    storage = open_folder(made.run_folder) if made.run_folder else None
    ledger = Ledger(storage, cloud.clock, events.say, project=cloud.project, region=made.attempts[0].region)
    watcher = RunWatcher(cloud, events, storage)
    driver = RunDriver(
        plan=made,
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

    def __init__(self, context: RunContext, events: Events, folder: Storage | None) -> None:
        self._context, self._events = context, events
        self._folder = folder
        self._cause = CauseFinder()
        self.job: Job | None = None

    def view(self, job: Job, number: int) -> JobView:
        """Return a new view of a job."""
        return RunJobView(self._context, job, number, self._folder, self._events.say)

    def report(self, event: RunEvent) -> None:
        """Pass an event on."""
        self.job = getattr(event, "job", None) or self.job
        if isinstance(event, AttemptStarted):
            self._cause.reset()
        for line in event.lines if isinstance(event, LinesPrinted) else ():
            self._cause.add(line.replica, line.text)
        self._events(event)

    def error_in_output(self) -> str:
        """Return the cause of the job's end that its log lines name, or an empty text."""
        return str(self._cause.cause or "")


def watch_job(
    run: FoundRun, watcher: RunWatcher, watch_seconds: float | None, refused: NotAuthorised | None = None
) -> Job:
    """Watch a run's job until it ends. Raises LaunchError: the job or `watch` failed; `refused` if another attempt is
    due."""
    from launcher.diagnosis import diagnose_end
    from launcher.runs.watch.loop import watch
    from launcher.runs.watch.pollers import intervals_of

    job, context = run.job, run.context
    intervals = intervals_of(context.of_run(run.storage).poll_seconds)
    watcher.report(AttemptStarted(job=job, number=0, created=False))
    view = watcher.view(job, 0)
    ended = watch(
        view, watcher.report, context.clock, wait_seconds=None, watch_seconds=watch_seconds, intervals=intervals
    ).job
    diagnosis = diagnose_end(ended, request.context_of_job(ended, context.project), watcher.error_in_output())
    if diagnosis.kind == "succeeded":
        return ended
    if refused and not is_final(diagnosis):
        watcher.report(AttemptFailed(job=ended, number=0, diagnosis=diagnosis))
        raise refused
    raise end_error(ended, diagnosis)


def with_its_own_image(made: Plan) -> Plan:
    """Return the plan unchanged: its image was pushed when the run was launched."""
    return made


def with_image(made: Plan, job: ImageBuildRequest, report: Report) -> Plan:
    """Return the plan with the digest of its image, which is pushed to the registry unless it exists there.

    A pinned image that this account may not look up is used unchecked. Raises LaunchError.
    """
    from launcher.images import pipeline

    try:
        found = pipeline.push(job, os.environ, report)
    except NotAuthorised as error:
        if not job.image.pinned:
            raise
        report.line(f"cannot check that {job.image.uri} exists: {error.problem}")
        return made
    report.line(f"image {found.reference}" + (" (already exists)" if found.how == "there" else ""))
    base = found.base or pipeline.recorded_base(job.image, found.reference, os.environ)
    return with_digest(made, found.reference, base)


def as_fresh_run(made: Plan, inputs: Inputs, cloud: CloudContext, say: Callable[[str], None]) -> Plan:
    """Return the plan under the next free run ID, or under the ID of its newest fresh run while that is active."""
    identity = identity_of(made.attempts[0])
    found = find_jobs(cloud, f'labels.{IDENTITY_LABEL}="{identity}"', searched(None))
    newest = {}
    for job in reversed(found.jobs):
        match = re.fullmatch(rf"{re.escape(made.run)}(?:-(\d+))?", job.run)
        if match and job.labels.get(IDENTITY_LABEL) == identity:
            newest[int(match[1] or 1)] = job
    newest.pop(0, None)  # set by --run-id
    number = max(newest, default=0)
    if number < 2 or newest[number].is_over:
        beside = [job for job in newest.values() if not job.is_over]
        for job in beside:
            say(f"{job.run} is {job.state} in {job.place}; starting another run")
        number = next(one for one in count(number + 1) if is_free(made, numbered_id(made.run, one), cloud))
    run_id = numbered_id(made.run, number)
    return planned(replace(inputs, context=replace(inputs.context, run_id=run_id)))


def is_free(made: Plan, run: str, cloud: CloudContext) -> bool:
    """Return whether the folder of run `run`, beside the plan's, has no attempts."""
    from launcher.runs.ledger import Ledger

    beside = (made.run_folder or "").rpartition("/")[0]
    folder = f"{beside}/{run}"
    region = made.attempts[0].region
    return not beside or not Ledger.open(folder, cloud.clock, project=cloud.project, region=region).entries()


def numbered_id(run: str, number: int) -> str:
    """Return RUN, RUN-2, RUN-3 …"""
    return run if number == 1 else f"{run}-{number}"


def check_run_exists(made: Plan, cloud: CloudContext) -> None:
    """Check that the run to resume was launched before. Raises UsageError."""
    found = find_jobs(cloud, f'labels.{RUN_LABEL}="{made.run}"', searched(None))
    if not found.jobs and is_free(made, made.run, cloud):
        raise UsageError(f"no run {made.run} to resume", f"{here_instead(made.run)}launch runs lists the runs.")


def allowed_change(made: Plan, inputs: Inputs, cloud: CloudContext) -> AllowedChange | None:
    """Return the change with which the plan may resume its run: another machine or place, more steps, or settings that
    alter no past step. Return None if there is nothing to resume, or if the submission must refuse the change.

    The run's earlier settings come from its newest job. With them, the spec must have the run's identity: then nothing
    else has changed.
    """
    jobs = find_jobs(cloud, f'labels.{RUN_LABEL}="{made.run}"', searched(None)).jobs
    stored = Ledger.open(made.run_folder).stored() if made.run_folder and not jobs else None
    before = jobs[0].request if jobs else stored.plan.attempts[0].request if stored else {}
    had, spec = request.read(before), inputs.spec
    try:
        config = json.loads(had.env.get(contract.CONFIG, "{}"))
    except ValueError:
        return None
    if config != spec.run.config and not (spec.run.is_builtin and is_resumable(config, spec.run.config)):
        return None
    with_its_settings = replace(
        spec, run=replace(spec.run, config=config), machine=replace(spec.machine, nodes=had.nodes)
    )
    identity = request.labels(before).get(IDENTITY_LABEL, "")
    if identity != compute_identity(with_its_settings, inputs.context, had.gpus):
        return None
    if identity == identity_of(made.attempts[0]) and not all(job.is_over for job in jobs):
        return None  # its job is followed where it is
    places = [(had.machine_type, had.provisioning, jobs[0].place)] if jobs else places_of(stored.plan) if stored else []
    computed = request.differences(before, comparable_request(made, before))
    return AllowedChange(identity=identity, lines=(*computed, *placement_changes(places, made)))


def places_of(made: Plan) -> list[tuple[str, str, str]]:
    """Return machine type, provisioning model, and region or zone of each attempt."""
    return [(one.machine_type, one.provisioning, one.where) for one in made.attempts]


def placement_changes(before: Sequence[tuple[str, str, str]], made: Plan) -> Iterator[str]:
    """Yield a line for each of machine type, provisioning model and place whose earlier value no attempt of the plan
    has: `provisioning: spot → standard`."""
    fields = ("machine type", "provisioning", "zone" if made.attempts[0].zone else "region")
    for name, old, new in zip(fields, zip(*before, strict=True), zip(*places_of(made), strict=True), strict=True):
        if not {*old} & {*new}:
            yield f"{name}: {', '.join(dict.fromkeys(old))} → {', '.join(dict.fromkeys(new))}"


def report_change(allowed: AllowedChange | None, inputs: Inputs, say: Callable[[str], None]) -> None:
    """Report what a resume changes."""
    if allowed is None:
        return
    for line in allowed.lines:
        say(f"resuming with {line.removeprefix('run.config.')}")
    changed = {line.partition(":")[0] for line in allowed.lines}
    if "run.config.steps" in changed:
        say("from here on the learning-rate schedule follows the new end")
    if changed & {"gpus", "nodes"} and not inputs.spec.run.is_builtin:
        say("your program must be able to load checkpoints of another number of processes")


def stored_plan(cloud: CloudContext, run: FoundRun) -> Plan:
    """Return the plan that a run was launched with. Raises UsageError: none exists; NotAuthorised: it isn't the
    run's."""
    made, refused = checked_plan(cloud, run)
    if refused:
        raise refused
    if made is None:
        raise UsageError(
            f"the folder of {run.id} ({run.folder or 'none'}) has no readable plan",
            f"Add the spec: {run.job.command} --resume {run.id}",
        )
    return made


def checked_plan(cloud: CloudContext, run: FoundRun) -> tuple[Plan | None, NotAuthorised | None]:
    """Return the plan in a run's folder (None: no readable one), and the error if it must not be submitted. Raises
    LaunchError: the records to check it against cannot be read."""
    try:
        ledger = Ledger.open(run.folder) if run.folder else None
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
