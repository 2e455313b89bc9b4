"""Watch a job until it ends: one loop that polls its state, its lines and its progress.

A network error neither ends the watch nor counts as success: only the service's own answer ends it. The clock and all
access to the cloud are passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from msgspec import Struct
from msgspec.structs import replace

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, StillRunning, UnreachableError
from launcher.gcp.api import retry_after, status_of
from launcher.jobs.job import GONE, WAITING, Job
from launcher.runs.logs.line import Line
from launcher.runs.metrics.progress import LIST_INTERVAL, Progress, ProgressReader
from launcher.services.base import GoneError

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launch_train.runfolder.starts import Record
    from launcher.runs.context import RunContext

QUEUED_SECONDS: Final = 120.0
"""Time in the state QUEUED after which a note explains it."""
REFUSED_SECONDS: Final = 300.0
"""Time for the user to renew credentials: a token is valid for an hour, and a job may run for days."""
OUTPUT_OUTAGE_SECONDS: Final = 60.0
"""Time after which a failure to read lines or progress is reported; no decision depends on them."""
MAX_RETRY_AFTER: Final = 300.0
"""Upper bound in seconds for a service's Retry-After."""
CONFIRMATIONS: Final = 3
"""Consecutive 404s or refusals before one is believed."""
LAST_SECONDS: Final = 30.0
"""How long late lines are read after the job's end."""
STATE_NOTES: Final = {
    "CANCELLING": "",
    "RUNNING": "",
    "STOPPED": "",  # a workstation VM
    "PAUSED": "paused by Vertex AI; still watching",
    "UPDATING": "being updated by Vertex AI, may be running; still watching",
}
"""States that are neither waiting nor final, with the note for the user."""
LOCAL_LIST_SECONDS: Final = 5.0
"""Interval between two listings of the metrics where they are files on this machine."""

# --- What a watch reports and polls -----------------------------------------------------------------------------------

PollTarget = Literal["job", "lines", "progress"]


class StateChanged(Struct, frozen=True):
    """The job's state changed. `previous` is None on the first poll."""

    job: Job
    previous: str | None


class LinesPrinted(Struct, frozen=True):
    """The job printed at least one new line."""

    lines: list[Line]


class ProgressUpdated(Struct, frozen=True):
    """The run's metrics show new progress."""

    progress: Progress


class OutageStarted(Struct, frozen=True):
    """Polls of `target` fail. `since` is a time on the watch's clock, `problem` says why and what to do."""

    since: float
    problem: str
    target: PollTarget = "job"


class OutageEnded(Struct, frozen=True):
    """A reported outage of `target` ended after `seconds`."""

    seconds: float
    target: PollTarget = "job"


class Note(Struct, frozen=True):
    """A sentence for the user."""

    text: str


Event = StateChanged | LinesPrinted | ProgressUpdated | OutageStarted | OutageEnded | Note
EventSink = Callable[[Event], None]


class JobView(Protocol):
    """The three things that a watch polls. Each method raises LaunchError; UnreachableError where a retry may help."""

    def job(self) -> Job:
        """Return the job's current state."""

    def lines(self) -> list[Line]:
        """Return the lines printed since the last call, in order."""

    def progress(self) -> Progress | None:
        """Return the progress; None: nothing new since the last call."""


class Intervals(NamedTuple):
    """Shortest and longest poll intervals in seconds. The defaults are for the cloud."""

    job: tuple[float, float] = (2.0, 10.0)
    lines: tuple[float, float] = (5.0, 60.0)
    """A project may read 60 times a minute, all users together: https://cloud.google.com/logging/quotas. Errors
    lengthen the interval up to the second value."""
    progress: tuple[float, float] = (10.0, 60.0)
    waiting: float = 30.0
    """For lines and progress before the job runs: only Vertex AI itself can log something then."""
    last: float = 3.0
    """Between polls for late lines after the job's end."""


CLOUD: Final = Intervals()


def intervals_of(seconds: float | None) -> Intervals:
    """Return the intervals of a service that is polled every so many seconds; None: those of the cloud."""
    if seconds is None:
        return CLOUD
    each = (seconds, seconds)
    return Intervals(job=each, lines=each, progress=each, waiting=seconds, last=0.0)


# --- The loop ---------------------------------------------------------------------------------------------------------


class WatchResult(Struct, frozen=True):
    """The job at the end of a watch, and why the watch ended."""

    job: Job
    """The last known state; `jobs.GONE` for a deleted job."""
    reason: Literal["ended", "wait_limit", "stop_condition"]


def watch(
    view: JobView,
    report: EventSink,
    clock: Clock,
    *,
    wait_seconds: float | None,
    waited: float = 0.0,
    watch_seconds: float | None = None,
    stop_when: Callable[[Job], bool] = lambda _job: False,
    intervals: Intervals = CLOUD,
) -> WatchResult:
    """Watch a job until it ends, `stop_when` is true, or it has waited `wait_seconds` for machines.

    `waited`: the part of `wait_seconds` that was used before this watch.

    Raises:
        StillRunning: `watch_seconds` have passed; the job is still running.
        NotAuthorised: access was withdrawn; the job is still running.
        LaunchError: the first poll was refused, or the job does not exist.
    """
    until = clock.now() + watch_seconds if watch_seconds is not None else float("inf")
    job = JobPoller(view, report, clock, waited, intervals)
    output = OutputPoller(view, report, clock, intervals)
    while True:
        job.poll()
        if job.ended:
            output.poll_last()
            return WatchResult(job.ended, "ended")
        if job.last and job.is_waiting and wait_seconds is not None and job.waited >= wait_seconds:
            return WatchResult(job.last, "wait_limit")
        if job.last and stop_when(job.last):
            return WatchResult(job.last, "stop_condition")
        output.poll(waiting=job.is_waiting)
        if clock.now() >= until:
            raise StillRunning(*still_running_text(job.last, "is still"))
        clock.sleep(max(0.0, min(job.schedule.due, output.due, until) - clock.now()))


# --- Polling ----------------------------------------------------------------------------------------------------------


class PollSchedule:
    """When the next poll is due: `shortest` seconds after the last one, or up to `longest` after a back-off."""

    def __init__(self, clock: Clock, shortest: float, longest: float) -> None:
        self._clock = clock
        self._shortest, self._longest = shortest, longest
        self._interval = shortest
        self.due = clock.now()

    @property
    def is_due(self) -> bool:
        return self._clock.now() >= self.due

    def back_off(self, factor: float, at_least: float = 0.0) -> None:
        """Multiply the interval by `factor` (below 1 it gets shorter), and wait `at_least` so many seconds."""
        self._interval = min(max(self._interval * factor, self._shortest), self._longest)
        self.due = self._clock.now() + max(self._interval, min(at_least, MAX_RETRY_AFTER))

    def reset(self) -> None:
        """Return to the shortest interval."""
        self._interval = self._shortest
        self.due = self._clock.now() + self._interval

    def poll_now(self) -> None:
        """Return to the shortest interval and make a poll due at once."""
        self._interval, self.due = self._shortest, self._clock.now()


class OutageReporter:
    """Reports one event when polls begin to fail, and one when they work again."""

    def __init__(self, target: PollTarget, report: EventSink, clock: Clock, delay: float) -> None:
        """`delay`: seconds of failures before the first report."""
        self._target, self._report, self._clock, self._delay = target, report, clock, delay
        self._reported: set[str] = set()
        self.since: float | None = None

    def failed(self, error: LaunchError, kind: str = "unreachable") -> None:
        """Record a failed poll. Each kind of failure is reported once: a refusal needs another fix than an outage."""
        now = self._clock.now()
        self.since = now if self.since is None else self.since
        if now - self.since >= self._delay and kind not in self._reported:
            self._reported.add(kind)
            self._report(OutageStarted(self.since, str(error), self._target))

    def succeeded(self) -> None:
        """Record a successful poll."""
        if self._reported and self.since is not None:
            self._report(OutageEnded(self._clock.now() - self.since, self._target))
        self.since = None
        self._reported.clear()


class JobPoller:
    """Poll the job's state."""

    def __init__(
        self, view: JobView, report: EventSink, clock: Clock, waited: float, intervals: Intervals = CLOUD
    ) -> None:
        self._view, self._report, self._clock = view, report, clock
        self._outage = OutageReporter("job", report, clock, 0.0)
        self._seen_at = self._changed_at = clock.now()
        self._missing = self._refused = 0
        self._refused_since = 0.0
        self._noted_states: set[str] = set()
        self.schedule = PollSchedule(clock, *intervals.job)
        self.waited = waited
        """Seconds in QUEUED and PENDING since it last ran."""
        self.last: Job | None = None
        self.ended: Job | None = None

    @property
    def is_waiting(self) -> bool:
        """Return whether the job was waiting for machines at the last poll."""
        return self.last is not None and self.last.is_waiting

    def poll(self) -> None:
        """Poll if it is due. Raises NotAuthorised, LaunchError: see `watch`."""
        if not self.schedule.is_due:
            return
        try:
            job = self._view.job()
        except LaunchError as error:
            self._handle_error(error)
        else:
            self._update(job)

    def _update(self, job: Job) -> None:
        self._missing = self._refused = 0
        self._outage.succeeded()
        previous = self.last
        self._count_waiting(job)
        self.last = job
        if previous is None or previous.state != job.state:
            self._changed_at = self._clock.now()
            self.schedule.reset()
            self._report(StateChanged(job, previous.state if previous else None))
        else:
            self.schedule.back_off(1.25)
        self._explain_state(job)
        if job.has_ended or (job.ended is not None and not is_known_state(job)):
            self.ended = job

    def _count_waiting(self, job: Job) -> None:
        """Add the time between two polls that both saw the job wait. For a job that ran before this watch began, the
        start of its wait is unknown, so the count starts at 0."""
        now = self._clock.now()
        if (self.last is None and job.started is not None) or job.state == "RUNNING":
            self.waited = 0.0
        elif self.last and self.last.is_waiting and job.is_waiting:
            self.waited += now - self._seen_at
        self._seen_at = now

    def _explain_state(self, job: Job) -> None:
        """Report a note on an unusual state or on the reason for a wait, once for each."""
        if job.state == "QUEUED" and self._clock.now() - self._changed_at >= QUEUED_SECONDS:
            self._note(job, "Vertex AI is waiting for machines or for quota (it queues for both)")
        elif job.reason:
            self._note(job, job.reason)
        elif not is_known_state(job):
            self._note(job, "unknown state; " + ("still watching" if job.ended is None else "the job has ended"))
        elif STATE_NOTES.get(job.state):
            self._note(job, STATE_NOTES[job.state])

    def _note(self, job: Job, text: str) -> None:
        if job.state + job.reason not in self._noted_states:
            self._noted_states.add(job.state + job.reason)
            self._report(Note(f"{job.state or 'no state'}: {text}"))

    def _handle_error(self, error: LaunchError) -> None:
        self.schedule.back_off(1.25, retry_after(error))
        if isinstance(error, UnreachableError):
            self._missing = 0
            self._outage.failed(error)
        elif isinstance(error, GoneError) or status_of(error) == 404:
            self._handle_missing(error)
        else:
            self._handle_refusal(error)

    def _handle_missing(self, error: LaunchError) -> None:
        """Treat the job as deleted after several 404s. At first, some of Google's servers may not know a new job."""
        self._missing += 1
        if self._missing < CONFIRMATIONS:
            return
        if self.last is None:
            raise error
        self.ended = replace(self.last, state=GONE)
        self._report(StateChanged(self.ended, self.last.state))

    def _handle_refusal(self, error: LaunchError) -> None:
        """Raise at once if access never worked; otherwise give the user time to renew the credentials."""
        if self.last is None:
            raise error
        self._missing = 0
        self._refused += 1
        if self._refused == 1:
            self._refused_since = self._clock.now()
        self._outage.failed(error, "refused")
        if self._refused >= CONFIRMATIONS and self._clock.now() - self._refused_since >= REFUSED_SECONDS:
            problem, hint = still_running_text(self.last, "was last seen")
            raise NotAuthorised(f"{error.problem}\n{problem}", "\n".join(filter(None, (error.hint, hint)))) from error


def is_known_state(job: Job) -> bool:
    """Return whether this version of launch knows the job's state."""
    return job.has_ended or job.state in WAITING or job.state in STATE_NOTES


class OutputPoller:
    """Poll lines and progress. Errors are reported, but never end the watch."""

    def __init__(self, view: JobView, report: EventSink, clock: Clock, intervals: Intervals = CLOUD) -> None:
        self._view, self._report, self._clock = view, report, clock
        self._lines, self._progress = PollSchedule(clock, *intervals.lines), PollSchedule(clock, *intervals.progress)
        self._waiting_interval, self._last_interval = intervals.waiting, intervals.last
        self._lines_outage = OutageReporter("lines", report, clock, OUTPUT_OUTAGE_SECONDS)
        self._progress_outage = OutageReporter("progress", report, clock, OUTPUT_OUTAGE_SECONDS)
        self._waiting = False

    @property
    def due(self) -> float:
        """Return the time of the next poll on the watch's clock."""
        return min(self._lines.due, self._progress.due)

    def poll(self, *, waiting: bool) -> None:
        if self._waiting and not waiting:
            self._lines.poll_now()
            self._progress.poll_now()
        self._waiting = waiting
        if self._lines.is_due:
            self._poll_lines()
        if self._progress.is_due:
            self._poll_progress()

    def poll_last(self) -> None:
        """Read what arrives late after the job's end: lines until two polls in a row bring none, then the progress."""
        until, quiet = self._clock.now() + LAST_SECONDS, 0
        while quiet < 2:
            quiet = quiet + 1 if self._poll_lines() == 0 else 0
            if self._clock.now() + self._last_interval > until:
                break
            if quiet < 2:
                self._clock.sleep(self._last_interval)
        if self._lines_outage.since is not None:
            self._report(Note("the last lines could not be read; launch logs may show them later"))
        elif quiet < 2:
            self._report(Note("more lines are still arriving; launch logs shows all of them"))
        self._poll_progress()

    def _poll_lines(self) -> int | None:
        """Report new lines and return their number; None: the poll failed."""
        try:
            lines = self._view.lines()
        except LaunchError as error:
            self._lines.back_off(2, retry_after(error))
            self._lines_outage.failed(error)
            return None
        self._lines_outage.succeeded()
        self._lines.back_off(0.5, self._waiting_interval if self._waiting else 0.0)
        if lines:
            self._report(LinesPrinted(lines))
        return len(lines)

    def _poll_progress(self) -> None:
        try:
            progress = self._view.progress()
        except LaunchError as error:
            self._progress.back_off(2)
            self._progress_outage.failed(error)
            return
        self._progress_outage.succeeded()
        self._progress.back_off(0.5, self._waiting_interval if self._waiting else 0.0)
        if progress is not None:
            self._report(ProgressUpdated(progress))


def still_running_text(job: Job | None, is_still: str) -> tuple[str, str]:
    """Return the problem and the hint for a watch that ended before its job did."""
    if job is None:
        return "the job's state could not be read", "Show the job: launch status"
    hint = f"The job continues. To watch it: launch follow {job.run or job.name}"
    return f"{job.handle if job.is_here else job.name} {is_still} {job.state}", hint


# --- A run's job ------------------------------------------------------------------------------------------------------


class RunJobView:
    """The JobView of one job. `number` is that of its attempt, 0 if unknown."""

    def __init__(
        self,
        context: RunContext,
        job: Job,
        number: int,
        folder: Storage | None,
        say: Callable[[str], None],
        *,
        tail: int | None = None,
    ) -> None:
        """`tail`: number of lines to begin with; None: all."""
        self._service, self._name = context.of_run(folder), job.name
        self._lines = context.open_log(job, folder, say, attempt=number, tail=tail)
        interval = LIST_INTERVAL if self._service.poll_seconds is None else LOCAL_LIST_SECONDS
        self._progress = (
            ProgressReader(folder, job, attempt=number or 1, clock=context.clock, list_interval=interval)
            if folder
            else None
        )

    @property
    def newest_rows(self) -> tuple[Record, ...]:
        """Return the newest rows of metrics, oldest first."""
        return self._progress.newest_rows if self._progress else ()

    def job(self) -> Job:
        """Return the job's current state."""
        return self._service.get(self._name)

    def lines(self) -> list[Line]:
        return self._lines.read_new()

    def progress(self) -> Progress | None:
        """Return the newest progress, or None."""
        return self._progress.read_new() if self._progress else None
