"""A run in the cloud, as a Python object: submit, status, logs, metrics, wait, cancel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from launch_train.export import Exported, Format
from launch_train.runfolder.starts import RunMetrics
from launcher.errors import LaunchError, UsageError
from launcher.gcp.storage import open_folder
from launcher.images.pipeline import Builder, Report
from launcher.inputs.gather import project
from launcher.inputs.gcloud_config import person
from launcher.inputs.planning import Plan
from launcher.jobs.job import Job
from launcher.plan import model
from launcher.plan.names import is_of_another
from launcher.project.model import Check
from launcher.project.report import lines
from launcher.runs.attempts import AttemptEntry
from launcher.runs.cancelling import Cancellation, cancel_run
from launcher.runs.cloud import CloudContext, open_cloud
from launcher.runs.cost_limit import is_limited, require_limit
from launcher.runs.endings import RunSucceeded
from launcher.runs.exporting import export_checkpoint
from launcher.runs.find import FoundRun, NoSuchRun, in_folder, one_run, searched
from launcher.runs.follow import checked_plan, watch_job
from launcher.runs.logs.line import Line
from launcher.runs.metrics.gpu_nodes import Node, read_nodes
from launcher.runs.metrics.progress import Progress, ProgressReader
from launcher.runs.run_folder import ANSWER_SECONDS, open_run_folder, read_results, storage_of
from launcher.runs.submit import (
    RunEvent,
    RunWatcher,
    SubmitOptions,
    image_preparer,
    open_driver,
    submission,
    with_its_own_image,
)
from launcher.runs.watch import Note

OnEvent = Callable[[RunEvent], None]


class RunStatus(Struct, frozen=True, kw_only=True):
    """A run at one moment. Times are Unix seconds by Google's clock."""

    run: str
    job: Job
    """The active job, else the newest."""
    jobs: tuple[Job, ...]
    """All known jobs of the run, the newest first. Vertex AI deletes old jobs; VMs are deleted when they end."""
    attempts: tuple[AttemptEntry, ...] = ()
    """The attempts that the run's folder records, in order."""
    progress: Progress | None = None
    nodes: tuple[Node, ...] = ()
    """The newest GPU samples of each node."""
    problem: str = ""
    """Why the run's folder could not be read completely; empty if it could."""

    @property
    def state(self) -> str:
        """Return QUEUED, PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED, … (docs/output.md)."""
        return self.job.state

    @property
    def has_ended(self) -> bool:
        """Return whether no job of the run is waiting or running. Another attempt may still follow."""
        return self.job.is_over


def status_of(run: FoundRun) -> RunStatus:
    """Return the status of a run that was just looked up; reads its folder."""
    status = RunStatus(run=run.id, job=run.job, jobs=run.jobs)
    try:
        if run.folder:
            storage = open_folder(run.folder).within(ANSWER_SECONDS)
            status = replace(status, attempts=run.context.attempts(storage))
            number = next((entry.number for entry in reversed(status.attempts) if entry.job == run.job.name), 1)
            status = replace(status, progress=ProgressReader(storage, run.job, attempt=number).read_new())
            status = replace(status, nodes=read_nodes(storage))
    except LaunchError as error:
        status = replace(status, problem=error.problem)
    if run.job.is_here and run.job.error:  # which file is unreadable
        status = replace(status, problem=run.job.error.message)
    return status


def submit(
    plan: Plan,
    *,
    new: bool = False,
    resume: bool = False,
    builder: Builder = "auto",
    create_repository: bool = False,
    preflight: bool = True,
    yes: bool = False,
    on_event: OnEvent | None = None,
) -> Run:
    """Submit a plan and return its run once a job exists. Pushes the image first, if the registry lacks it.

    A run that is active or has succeeded is returned as it is: submitting twice creates one job. `new` submits under
    the next free run ID instead (RUN-2, …); `resume` continues a run that failed or was cancelled. `builder` is auto,
    append, docker or cloud-build. `preflight` checks the project first (docs/project.md). `yes` accepts a run that
    could cost more than $100 without limits.usd, limits.hours or a cap in a settings file.

    Raises:
        UsageError: the plan, its bucket, its repository or its project cannot be used, the run ID has another
            computation, or it could cost more than $100 without a limit and without `yes`.
        RunEnded: the run failed permanently, or was cancelled, and `resume` is not set.
        NoCapacity: every placement was refused for lack of capacity or quota.
        NotAuthorised: no credentials, or a permission is missing.
        LaunchError: anything else; the message says what to do.
    """
    events = EventSink(on_event)
    cloud = open_cloud(plan.project, events.say)
    confirm = partial(require_limit, limited=yes or is_limited(plan.inputs))
    options = SubmitOptions(builder=builder, create_repository=create_repository, preflight=preflight)
    ready = image_preparer(plan.inputs, cloud, events, options)
    driver, _ = submission(plan.data, plan.inputs, cloud, events, ready, confirm, new=new, resume=resume)
    planned = driver.plan
    with suppress(RunSucceeded):  # there is nothing to do; its results are readable
        driver.drive(fresh=True, resume=resume, detach=True)
    return Run(cloud, planned.run, planned.run_folder, plan=planned, ready=driver.ready)


def find(name: str, *, regions: Sequence[str] | None = None, on_event: OnEvent | None = None) -> Run:
    """Return a run in the cloud by its name, ID or folder (gs://…), or by a job's number or resource name.

    Searches gcloud's project, in `regions` or wherever Vertex AI trains.

    Raises:
        UsageError: no project is set, no such run exists, or several runs have that name.
        UnreachableError: no such run was found in the regions that could be read.
        NotAuthorised: no credentials, or a permission is missing.
    """
    cloud = open_cloud(project("vertex", os.environ), EventSink(on_event).say)
    run = one_run(cloud, name, searched(regions))
    return Run(cloud, run.id, run.folder)


class Run:
    """A run in the cloud. Every method asks Google; nothing is kept between calls but the run's ID and plan.

    All methods raise LaunchError, with the causes and fixes that the commands print: NotAuthorised, UnreachableError
    (no answer; try again), NoSuchRun (Google no longer knows the run, and its folder does not exist).
    """

    def __init__(
        self,
        cloud: CloudContext,
        run: str,
        folder: str | None,
        *,
        plan: model.Plan | None = None,
        ready: Callable[[model.Plan], model.Plan] = with_its_own_image,
    ) -> None:
        """For `submit` and `find`. `ready` returns the plan with its image in the registry."""
        self._cloud, self._plan, self._ready = cloud, plan, ready
        self.id = run
        self.folder = folder
        """The run folder (gs://…/RUN); None if the run has none."""

    def __repr__(self) -> str:
        return f"<Run {self.id} of {self._cloud.project}>"

    def status(self) -> RunStatus:
        """Return the run's state, attempts and progress."""
        return status_of(self._look_up())

    def logs(self, *, tail: int | None = None) -> Iterator[Line]:
        """Yield the log lines of the active or newest job so far, or the last `tail` lines."""
        run = self._look_up()
        return self._cloud.open_log(run.job, run.storage, self._cloud.notice, tail=tail).read_existing()

    def metrics(self) -> RunMetrics | None:
        """Return the metrics that the run has written; None: none yet, or the run has no folder.

        `rows` has one record for each step, from the newest start that ran it; `events` has the evaluations and errors.
        """
        return read_results(storage_of(self.folder))

    def export(
        self,
        format: Format,  # noqa: A002 - the option's name
        *,
        step: int | Literal["best"] | None = None,
        output: str | Path | None = None,
        weights_only: bool = False,
        tokenizer: str | Path | None = None,
    ) -> Exported:
        """Write a checkpoint in a format that other programs load, and return its folder and files.

        `format` is safetensors, hf, torch or dcp. `step` is a number or best (lowest held-out loss); default: newest.
        `output` is a new folder, here or gs://…; default: ./RUN-step-N-FORMAT. `weights_only` leaves out the
        optimizer's state (hf, dcp). `tokenizer` is a tokenizer.json (here or gs://…) to write next to the weights.

        Raises UsageError: invalid format, `output` is not empty, or a package is missing; LaunchError: no such
        checkpoint, it is damaged, PyTorch is missing, or nothing can be written.
        """
        folder = open_run_folder(self.id, self.folder)
        target = str(output) if output is not None else None
        return export_checkpoint(
            self.id,
            folder,
            format,
            target,
            step=step,
            weights_only=weights_only,
            tokenizer=str(tokenizer) if tokenizer is not None else None,
            say=self._cloud.notice,
        )

    def wait(self, timeout: float | None = None, *, on_event: OnEvent | None = None) -> RunStatus:
        """Wait until the run succeeds, and return its status. Starts the next attempt when one ends for lack of
        capacity or after a preemption, as `launch follow` does.

        `timeout` is in seconds. `on_event` gets each state, log line and progress update, on the calling thread.

        Raises:
            StillRunning: `timeout` has passed; the run continues.
            JobFailed: the job failed; the error names the cause in its output.
            NoCapacity: no placement had capacity.
            RunEnded: the run had already failed or been cancelled.
            NotAuthorised: another attempt is due, but the plan in the run's folder cannot be trusted.
        """
        events = EventSink(on_event)
        plan, refused, found = self._plan, None, None
        if plan is None:
            found = self._look_up()
            plan, refused = checked_plan(self._cloud, found)
        ended: Job | None
        if plan is None or refused:
            run = found or self._look_up()
            ended = watch_job(run, RunWatcher(self._cloud, events, run.storage), timeout, refused)
        else:
            driver, _ = open_driver(self._cloud, plan, events, self._ready)
            try:
                ended = driver.drive(fresh=False, watch_seconds=timeout)
            except RunSucceeded as success:
                ended = success.job  # None: Vertex AI deletes old jobs
        return status_of(FoundRun(id=self.id, jobs=(ended,), context=self._cloud)) if ended else self.status()

    def cancel(self, *, of_another: bool = False) -> Cancellation:
        """Cancel the run and wait for confirmation; a run that has ended stays as it is. Its checkpoints are kept.

        Raises UsageError: the run belongs to another account, and `of_another` is not set; LaunchError: a job may still
        be running, or its VM still costs money.
        """
        run = self._look_up()
        if not of_another and run.is_active and is_of_another(run.job.labels, person(os.environ)):
            raise UsageError(
                f"{self.id} belongs to another account", "To cancel it anyway: run.cancel(of_another=True)"
            )
        cancelled = cancel_run(run, self._cloud.notice)
        if cancelled.errors:
            raise cancelled.errors[0]
        return cancelled

    def _look_up(self) -> FoundRun:
        """Return the run with its present jobs: by its label, else by its folder."""
        vertex = self._plan is not None and self._plan.target == "vertex"
        regions = {attempt.region: None for attempt in self._plan.attempts} if self._plan and vertex else None
        try:
            return one_run(self._cloud, self.id, tuple(regions) if regions else searched(None))
        except NoSuchRun:
            if self.folder and (run := in_folder(self._cloud, self.folder)):
                return run
            raise


class EventSink:
    """Passes events and messages to a function, or drops them."""

    def __init__(self, on_event: OnEvent | None) -> None:
        self._on_event = on_event

    def __call__(self, event: RunEvent) -> None:
        if self._on_event:
            self._on_event(event)

    def say(self, text: str) -> None:
        """Pass a message on, as a Note."""
        self(Note(text))

    def show_checks(self, checks: tuple[Check, ...]) -> None:
        """Pass on what is wrong, as a Note."""
        self.say("\n".join(lines(check for check in checks if check.status in ("failed", "warning"))))

    @contextmanager
    def building(self) -> Iterator[Report]:
        """Yield the receiver of an image's progress: its messages are Notes."""
        yield Report(line=self.say)
