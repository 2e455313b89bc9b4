"""Run a sweep in the cloud: submit its points in parallel, poll all their jobs together, submit what is due.

Each point is a run with its own driver, locks and attempts, so the sweep itself has no state: killed at any moment and
started again, it continues each run from its actual state.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec.structs import replace

from launch_train.common.storage import GcsFolder, OutputError, Storage
from launcher.diagnosis.output_cause import CauseFinder
from launcher.errors import LaunchError, StillRunning, UnreachableError
from launcher.gcp.api import status_of
from launcher.gcp.parallel import in_pool
from launcher.gcp.storage import explain_error, open_folder, use_errors
from launcher.jobs.job import SWEEP_LABEL, Job
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.runs.attempts import place_of
from launcher.runs.cancelling import cancel_run
from launcher.runs.cloud import CloudContext
from launcher.runs.driver import RunDriver
from launcher.runs.endings import CANCELLED, RunEnded, RunSucceeded
from launcher.runs.find import FoundRun
from launcher.runs.ledger import Ledger
from launcher.runs.logs.reader import LogReader
from launcher.runs.sweep.events import OnEvent, PointChanged, PointRun, State, cause_of
from launcher.runs.sweep.plan import SweepPlan
from launcher.runs.sweep.record import mark_version, write_record
from launcher.services.vertex import import_client_library

SUBMITTERS: Final = 100
"""Points submitted in parallel. Each waits for the cloud most of the time."""
POLL_SECONDS: Final = 10.0
CURRENT_SECONDS: Final = 3.0
"""Age up to which an answer about a cancellation is current."""
MOST_FAILURES: Final = 5
"""Consecutive polls without an answer about a point, after which it is left to the next launch."""

MOST_BUSY: Final = 20
"""Rounds of retries that a rate limit may refuse. Each takes half a minute, so a thousand points get their turn."""
MOST_CAUSES: Final = 3
"""Number of failed points whose output is searched for the cause: a project may read its log 60 times a minute."""
TAIL: Final = 200
"""Number of last output lines that are searched."""


class CloudPoint(PointRun, kw_only=True):
    """A point and its run's driver."""

    is_due: bool = False
    """Its job has ended or is unknown, so its driver must decide."""
    resume: bool = False
    """True: it had failed, and runs again."""
    driver: RunDriver | None = None
    number: int = 0
    """The attempt's number."""
    wait_until: float | None = None
    """End of the time that the attempt may wait for machines, by the cloud's clock; None: no limit."""
    is_overdue: bool = False
    """At the last poll its job was waiting, longer than it may."""
    failures: int = 0
    busy: int = 0
    """Rounds in which a rate limit outlasted all retries."""

    def take_end(self, state: State, ended: RunEnded, *, before: bool) -> None:
        """Note how the run has ended. `before`: it had not been submitted by this command."""
        self.state, self.job = state, ended.job or self.job
        self.had_ended = before and (state == "succeeded" or ended.job is not None)
        self.ended = ended.job.ended if ended.job else None


class NoWatcher:
    """The watcher of a driver that only submits."""

    def error_in_output(self) -> str:
        """Return an empty text: no output was read."""
        return ""


class CloudSweep:
    """A sweep that runs in the cloud."""

    def __init__(
        self,
        plan: SweepPlan,
        cloud: CloudContext,
        prepare: Callable[[Plan], Plan],
        on_event: OnEvent,
        say: Callable[[str], None],
        max_parallel: int | None = None,
        retry_failed: bool = False,
        confirm: Callable[[Plan], None] = lambda _plan: None,
    ) -> None:
        """`prepare` returns a plan with its image in the registry; points with the same image and machine share it.
        `on_event` and `say` are called on several threads. `confirm` accepts the sweep's cost before the first job of a
        new or resumed run, or raises."""
        self.plan, self.cloud = plan, cloud
        self.runs = [CloudPoint(point=point) for point in plan.points]
        self._prepare, self._on_event, self._say, self._confirm = prepare, on_event, say, confirm
        self._most, self._retry = max_parallel or len(self.runs), retry_failed
        self._prepared: dict[tuple[object, ...], Plan] = {}
        self._failure: LaunchError | None = None
        """Why no point can be prepared."""
        self._trouble = ""
        self._lock, self._cancel_lock = threading.Lock(), threading.Lock()
        self._cancel_state = (False, -math.inf)
        """Whether the sweep was cancelled, and the time of that answer."""
        self._earlier_mark = ""
        """Version of the mark of an earlier cancellation."""
        self._created: list[CloudPoint] = []
        """Points whose job was created since the mark was last read for them."""
        self._client: object = None
        if plan.output.startswith("gs://"):
            from launch_train.common.storage.client import open_storage_client

            with use_errors():
                self._client = open_storage_client()

    def run(self, *, detach: bool = False, seconds: float | None = None) -> None:
        """Run all points to their ends; with `detach`, return once each has a job.

        A point that fails does not stop the others; its error is in its PointRun. Raises LaunchError: no point can be
        submitted; StillRunning: `seconds` have passed.
        """
        until = None if seconds is None else self.cloud.clock.now() + seconds
        threading.Thread(target=import_client_library, daemon=True).start()
        self._record()  # first: another sweep may have the name
        if self._most < len(self.runs):  # those that run count
            self.poll()
        while True:
            while due := list(self._next()):
                self._step_all(due)
            if detach or all(run.has_ended for run in self.runs):
                return
            if until is not None and self.cloud.clock.now() >= until:
                raise self._still_running()
            self.cloud.clock.sleep(POLL_SECONDS)
            self.poll()

    def _record(self) -> None:
        """Record the sweep's points in the output. Raises LaunchError: the output cannot be used, or another sweep has
        its name."""
        output, now = self.storage(self.plan.output), self.cloud.clock.now()
        try:
            self._earlier_mark = mark_version(output, self.plan.name)  # before `launch cancel` can find the record
            self._cancel_state = (False, now)
            write_record(output, self.plan)
        except OutputError as error:
            if status_of(error) != 403:
                region = self.plan.points[0].plan.attempts[0].region
                raise explain_error(error, {"PROJECT": self.plan.project, "REGION": region}) from error
            self._say(f"cannot record the sweep in {self.plan.output}, so only its jobs' labels name it: {error}")

    def poll(self) -> None:
        """Read the state of all jobs, and mark the points whose driver must decide."""
        wanted = f'labels.{SWEEP_LABEL}="{self.plan.name}"'
        places = dict.fromkeys(attempt.where for run in self.runs for attempt in run.point.plan.attempts)
        listing = self.cloud.service.find(wanted, places, partly=True)
        trouble = next((error.problem for error in listing.unread.values()), "")
        if trouble and trouble != self._trouble:
            self._say(f"{', '.join(listing.unread)} could not be read: {trouble}; retrying")
        self._trouble = trouble
        newest = {job.run: job for job in reversed(listing.jobs)}
        waiting = [run for run in self.runs if run.state == "waiting"]
        if waiting and self._is_cancelled():  # by `launch cancel`
            for run in waiting:
                run.state = "cancelled"
                self._on_event(PointChanged(run=run, kind="ended"))
        for run in self.runs:
            job = newest.get(run.point.run)
            if run.state == "waiting":
                run.is_due = run.is_due or (job is not None and not job.is_over)
            elif run.state == "active" and not (run.job and run.job.place in listing.unread):
                self._see(run, self._current_job(run, job))

    def _is_cancelled(self, *, read_now: bool = False) -> bool:
        """Return whether `launch cancel` was run since the start; False if that cannot be read. Points that begin
        together need one answer, so without `read_now` it may be a moment old."""
        called_at = self.cloud.clock.now()  # those that wait for the lock share the answer, however long it takes
        with self._cancel_lock:
            cancelled, read_at = self._cancel_state
            if not cancelled and (read_now or called_at - read_at > CURRENT_SECONDS):
                begun = self.cloud.clock.now()
                with suppress(OutputError):
                    mark = mark_version(self.storage(self.plan.output), self.plan.name)
                    cancelled = mark not in ("", self._earlier_mark)
                self._cancel_state = (cancelled, begun)
            return cancelled

    def _current_job(self, run: CloudPoint, listed: Job | None) -> Job | None:
        """Return the current state of a point's job; None: it does not exist, or cannot be read. `listed` is the newest
        job with the sweep's label, which another sweep's job or one of `launch vertex` does not have."""
        if run.job is None or (listed and (listed.name == run.job.name or not listed.is_over)):
            return listed
        with suppress(LaunchError):
            return self.cloud.service.get(run.job.name)
        return None

    def _see(self, run: CloudPoint, job: Job | None) -> None:
        """Update a point from its job's state."""
        if job is None or run.job is None or job.name != run.job.name or job.is_over:
            run.is_due = True
            return
        changed, run.job = job.state != run.job.state, job
        if changed:
            self._on_event(PointChanged(run=run, kind="state"))
        too_late = run.wait_until is not None and self.cloud.clock.now() >= run.wait_until
        run.is_due = run.is_overdue = job.is_waiting and too_late

    def _next(self) -> Iterator[CloudPoint]:
        """Yield the points to submit now: those whose job has ended, and waiting ones if `max_parallel` allows."""
        due = [run for run in self.runs if run.is_due and not run.has_ended]
        free = self._most - sum(run.state == "active" and not run.is_due for run in self.runs) - len(due)
        waiting = [run for run in self.runs if run.state == "waiting" and not run.is_due]
        yield from due
        yield from waiting[: max(0, free)]

    def _step_all(self, due: Sequence[CloudPoint]) -> None:
        """Submit points in parallel, and report those that have ended. Raises LaunchError: none can be submitted."""
        in_pool([partial(self._step, run) for run in due], SUBMITTERS)
        self._cancel_late_jobs()
        if self._failure and not any(run.state == "active" for run in self.runs):
            raise self._failure
        # All points were refused with the same error before any had a job, such as a missing bucket.
        errors = [run.error for run in self.runs if run.state == "failed" and run.job is None and run.error]
        is_refused = len(errors) == len(self.runs) and not isinstance(errors[0], RunEnded)
        if is_refused and len({cause_of(run) for run in self.runs}) == 1:
            raise errors[0]
        for run in due:
            if run.has_ended:
                self._read_cause(run)
                self._on_event(PointChanged(run=run, kind="ended"))

    def _cancel_late_jobs(self) -> None:
        """Cancel the jobs that were just created if `launch cancel` was run meanwhile. It writes its mark before it
        searches for jobs, so this read finds the mark if that search was too early to find one of these jobs."""
        created, self._created = self._created, []
        if created and self._is_cancelled(read_now=True):
            in_pool([partial(self._cancel_job, run) for run in created], SUBMITTERS)

    def _cancel_job(self, run: CloudPoint) -> None:
        """Cancel a point's job and wait for its end; if that fails, the point stays active."""
        if run.job is None:
            return
        self._say(f"{run.point.run}: the sweep was cancelled meanwhile; cancelling the job")
        done = cancel_run(FoundRun(id=run.point.run, jobs=(run.job,), context=self.cloud), self._say)
        for error in done.errors:
            self._say(f"{error.problem}; launch cancel {run.point.run} cancels it")
        run.is_due = not done.errors

    def _read_cause(self, run: CloudPoint) -> None:
        """Read why a point's program failed from its job's output; only for the first few, as reads are limited."""
        ended = run.error
        user = isinstance(ended, RunEnded) and ended.diagnosis.kind == "user"
        if not (user and run.job) or sum(bool(one.cause) for one in self.runs) >= MOST_CAUSES:
            return
        folder = self.storage(run.point.plan.run_folder or "")
        reader = LogReader(
            run.job, self.cloud.project, os.environ, say=self._say, folder=folder, tail=TAIL, clock=self.cloud.clock
        )
        finder = CauseFinder()
        with suppress(LaunchError):
            for line in reader.read_existing():
                finder.add(line.replica, line.text)
        run.cause = str(finder.cause or "")

    def _step(self, run: CloudPoint) -> None:
        """Let a point's driver decide: it finds the run's job, creates the next one, or says how the run has ended."""
        first, run.is_due = run.state == "waiting", False
        overdue, run.is_overdue = run.is_overdue, False
        if first and self._is_cancelled():
            run.state = "cancelled"
            return
        try:
            run.driver = driver = run.driver or self._driver(run)
            if overdue and run.job:
                driver.cancel_waiting_job(run.job, run.number, driver.wait_limit(run.job, run.number) or 0.0)
            submitted = driver.submit(fresh=first, resume=run.resume)
        except RunSucceeded as ended:
            run.take_end("succeeded", ended, before=first)
        except RunEnded as ended:
            if first and self._retry and not run.resume:
                run.resume = run.is_due = True
                return
            run.take_end("cancelled" if ended.diagnosis.kind == "cancelled" else "failed", ended, before=first)
            run.error = ended
        except (UnreachableError, StillRunning) as error:
            run.failures += 1
            if run.failures >= MOST_FAILURES:
                run.state, run.error = "unknown", error
            else:
                self._say(f"{run.point.run}: {error.problem}; retrying")
                run.is_due = run.state == "active"
                self.cloud.clock.sleep(POLL_SECONDS)
        except LaunchError as error:
            run.busy += 1
            if run.busy > MOST_BUSY or not is_rate_limited(run.driver):
                run.state, run.error = "failed", error
                return
            self._say(f"{run.point.run}: the service limits the rate of requests; retrying")
            run.state, run.is_due = "waiting", False  # another round of attempts
            self.cloud.clock.sleep(POLL_SECONDS)
        else:
            run.state, run.job, run.number, run.failures = "active", submitted.job, submitted.number, 0
            run.resume = False
            if submitted.created:
                self._created.append(run)
            self._limit_wait(run, driver, created=submitted.created)
            self._on_event(PointChanged(run=run, kind="started" if submitted.created else "found"))

    def _limit_wait(self, run: CloudPoint, driver: RunDriver, *, created: bool) -> None:
        """Set the time until which the attempt may wait for machines. `created`: its job was created just now."""
        run.wait_until = None
        limits = run.point.plan.limits
        if run.job and (limits.wait_seconds or limits.wait_total_seconds):
            wait = driver.wait_limit(run.job, run.number)
            if wait is not None:
                waited = 0.0 if created else driver.seconds_since_creation(run.job)
                run.wait_until = self.cloud.clock.now() + wait - waited

    def _driver(self, run: CloudPoint) -> RunDriver:
        """Return the driver of a point's run. Raises UsageError: the run folder cannot be used."""
        plan, cloud = run.point.plan, self.cloud
        storage = self.storage(plan.run_folder or "")

        def say(text: str) -> None:
            self._say(f"{run.point.run}: {text}")

        ledger = Ledger(storage, cloud.clock, say, project=cloud.project, region=plan.attempts[0].region)
        return RunDriver(
            plan=plan,
            service=cloud.of_run(storage),
            ledger=ledger,
            watcher=NoWatcher(),  # type: ignore[arg-type]  # a driver that only submits needs no view and no events
            say=say,
            ready=self._ready,
            clock=cloud.clock,
            confirm=self._confirm_cost,
        )

    def _confirm_cost(self, plan: Plan) -> None:
        """Accept the cost. Raises LaunchError: it is not accepted, which stops the sweep."""
        with self._lock:
            if self._failure:
                raise self._failure
            try:
                self._confirm(plan)
            except LaunchError as error:
                self._failure = error
                raise

    def storage(self, folder: str) -> Storage:
        """Return the storage of a folder; all share one client, whose connections stay open."""
        if self._client is None:
            return open_folder(folder)
        return GcsFolder(folder, self._client)

    def _ready(self, plan: Plan) -> Plan:
        """Return a point's plan with its image in the registry; the first point of each image and machine prepares it,
        while the others wait. Raises LaunchError: it failed, which stops the sweep."""
        key = (plan.image and plan.image.uri, plan.machines, tuple(map(place_of, plan.attempts)))
        with self._lock:
            if self._failure:
                raise self._failure
            try:
                prepared = self._prepared[key] = self._prepared.get(key) or self._prepare(plan)
            except LaunchError as error:
                self._failure = error
                raise
        if self._is_cancelled():  # building the image may have taken long
            raise RunEnded("the sweep was cancelled", "", None, CANCELLED)
        places = [place_of(attempt) for attempt in prepared.attempts]  # the preflight checks may have removed some
        kept = {place_of(attempt): attempt for attempt in plan.attempts}
        plan = replace(plan, attempts=tuple(kept[place] for place in places))
        return (
            with_digest(plan, prepared.image.uri, prepared.image.base)
            if prepared.image and prepared.image.pinned
            else plan
        )

    def _still_running(self) -> StillRunning:
        counts = Counter(run.state for run in self.runs)
        return StillRunning(
            f"{counts['active'] + counts['waiting']} of {len(self.runs)} points have not ended",
            f"The same command continues; launch cancel {self.plan.name} cancels them.",
        )


def is_rate_limited(driver: RunDriver | None) -> bool:
    """Return whether a run's newest attempt was refused only temporarily, because of too many requests."""
    try:
        entries = driver.ledger.entries() if driver else ()
    except LaunchError:
        return False
    end = entries[-1].end if entries else None
    return end is not None and end.state is None and end.is_transient
