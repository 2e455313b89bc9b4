"""Watch runs, each on its own thread, and keep the newest state of each for display.

The polling is that of `launch follow` (launcher/runs/watch.py). Nothing is submitted: if an attempt ends and another
launch starts the next one, the watch continues with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from launch_train.runfolder.run import RunData
from launch_train.runfolder.starts import Record
from launcher.diagnosis import diagnose_end
from launcher.errors import LaunchError, UnreachableError
from launcher.jobs.job import Job
from launcher.runs.attempts import RUN_ENDS, AttemptEntry
from launcher.runs.cancelling import cancel_run
from launcher.runs.find import FoundRun
from launcher.runs.logs.line import Line
from launcher.runs.metrics.gpu_nodes import Node, read_nodes
from launcher.runs.metrics.progress import Progress
from launcher.runs.run_folder import ANSWER_SECONDS
from launcher.runs.run_story import RunStory, read, story_of_job
from launcher.runs.watch import (
    Event,
    LinesPrinted,
    Note,
    OutageEnded,
    OutageStarted,
    PollTarget,
    ProgressUpdated,
    RunJobView,
    StateChanged,
    intervals_of,
    watch,
)
from launcher.services import request

TAIL: Final = 100
"""Number of last lines that are kept, and read at first."""
NEXT_SECONDS: Final = 300.0
"""Time limit of waiting for the next attempt."""
NEXT_INTERVAL: Final = 10.0
GPU_MINUTES: Final = 2
"""Minutes of GPU samples that are shown."""


class RunView(NamedTuple):
    """Snapshot of a watched run. `is_over`: it is no longer watched; `error`: why, if the run itself has not ended."""

    id: str
    job: Job | None = None
    progress: Progress | None = None
    newest_rows: Sequence[Record] = ()
    """The newest rows of metrics, oldest first."""
    nodes: tuple[Node, ...] = ()
    story: RunStory = RunStory()
    lines: tuple[Line, ...] = ()
    trouble: str = ""
    """Why the run is temporarily unreadable; empty if it is not."""
    note: str = ""
    is_over: bool = False
    error: LaunchError | None = None


class WatchedRun:
    """A run to watch; each attempt has its own view."""

    def __init__(self, run: FoundRun, say: Callable[[str], None] = lambda _text: None) -> None:
        self.id, self.clock = run.id, run.context.clock
        self.storage = run.storage.within(ANSWER_SECONDS) if run.storage else None
        self._run, self._context, self._say = run, run.context, say
        self._service = run.context.of_run(self.storage)
        self._records: RunData | None = None
        self._attempts: tuple[AttemptEntry, ...] | None = None
        self.intervals = intervals_of(self._service.poll_seconds)
        self.details_seconds = 60.0 if self._service.poll_seconds is None else 5.0
        """Between two readings of the story and the GPU samples."""

    def newest_job(self) -> Job:
        """Return the job of the newest attempt. Raises LaunchError."""
        return self._run.job

    def view(self, job: Job) -> RunJobView:
        """Return a view of an attempt's job. Raises LaunchError."""
        number = next((entry.number for entry in reversed(self._entries()) if entry.job == job.name), 0)
        return RunJobView(self._context, job, number, self.storage, self._say, tail=TAIL)

    def next_job(self, ended: Job) -> Job | None:
        """Return the job of a later attempt, or None. Raises LaunchError."""
        newest = next((entry for entry in reversed(self._entries()) if entry.job), None)
        return self._service.get(newest.job) if newest and newest.job and newest.job != ended.name else None

    def may_continue(self, ended: Job) -> bool:
        """Return whether another attempt may follow: not after an end that ends the run, nor without a folder."""
        diagnosis = diagnose_end(ended, request.context_of_job(ended, self._context.project))
        return self._service.outlives_client and self.storage is not None and diagnosis.kind not in RUN_ENDS

    def details(self, job: Job) -> tuple[RunStory, tuple[Node, ...]]:
        """Read the run's folder, and return the story and the GPU samples. Raises LaunchError."""
        self._records, self._attempts = read(self.storage) or self._records, self._entries()
        return self._story(job), read_nodes(self.storage, GPU_MINUTES) if self.storage else ()

    def current_story(self, job: Job) -> RunStory | None:
        """Return the current story, based on the records that were read last; None if they must be read again."""
        return None if self._attempts is None else self._story(job)

    def cancel(self, job: Job | None, say: Callable[[str], None]) -> bool:
        """Cancel the run, whose newest known job is `job`; return False if it had ended. Raises LaunchError."""
        job = (self.next_job(job) or job) if job else None  # a later attempt may have begun
        jobs = (job,) if job else self._run.jobs
        cancelled = cancel_run(FoundRun(id=self.id, jobs=jobs, context=self._context), say)
        if cancelled.errors:
            raise cancelled.errors[0]
        return cancelled.done

    def _story(self, job: Job) -> RunStory:
        return story_of_job(self._context, self._records, self.id, job, self._attempts or (), self.storage, time.time())

    def _entries(self) -> tuple[AttemptEntry, ...]:
        return self._context.attempts(self.storage) if self.storage else ()


class RunWatch:
    """Watches one run on a thread until it ends. `view` is the newest snapshot."""

    def __init__(self, source: WatchedRun, on_event: Callable[[Event], None] = lambda _event: None) -> None:
        """`on_event` receives all events, on the watch's thread."""
        self.source = source
        self._on_event = on_event
        self._lock = threading.Lock()
        self._lines: deque[Line] = deque(maxlen=TAIL)
        self._troubles: dict[PollTarget, str] = {}
        self._details_due = 0.0
        self._view = RunView(source.id)
        self._thread = threading.Thread(target=self._run, name=f"watch {source.id}", daemon=True)

    @property
    def view(self) -> RunView:
        with self._lock:
            return self._view

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; return whether the watch has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._watch_attempts()
        except LaunchError as error:
            self.update(error=error)
        except Exception as error:  # noqa: BLE001 - the screen must learn of it, whatever it is
            self.update(error=LaunchError(f"unexpected error: {type(error).__name__}: {error}"))
        finally:
            self.update(is_over=True)

    def _watch_attempts(self) -> None:
        source = self.source
        job: Job | None = source.newest_job()
        while job:
            view = self._opened(job)
            self._handle(StateChanged(job, None))
            if job.is_over:  # nothing more will come
                self._handle(LinesPrinted(view.lines()))
                if progress := view.progress():
                    self._handle(ProgressUpdated(progress))
                self.update(newest_rows=view.newest_rows)
            else:
                detailed = DetailedView(view, self)
                job = watch(detailed, self._report, source.clock, wait_seconds=None, intervals=source.intervals).job
            try:
                self.refresh(job, force=True)
            except LaunchError as error:
                self.update(note=f"its folder could not be read at the end: {error.problem}")
            job = self._next_job(job) if source.may_continue(job) else None

    def _opened(self, job: Job) -> RunJobView:
        """Return a view of a job; retry during outages."""
        while True:
            try:
                return self.source.view(job)
            except UnreachableError as error:
                self.update(trouble=error.problem)
                self.source.clock.sleep(NEXT_INTERVAL)
                self.update(trouble="")

    def _next_job(self, ended: Job) -> Job | None:
        """Wait for the next attempt; None: none was started in time."""
        self._report(Note(f"no attempt is running; launch follow {self.source.id} starts the next one"))
        until = self.source.clock.now() + NEXT_SECONDS
        while self.source.clock.now() < until:
            try:
                if job := self.source.next_job(ended):
                    return job
            except LaunchError as error:
                self.update(note=error.problem)
            self.source.clock.sleep(NEXT_INTERVAL)
        return None

    def refresh(self, job: Job, *, force: bool = False) -> None:
        """Read the story and the GPU samples if they are due; else update the story. Raises LaunchError."""
        now = self.source.clock.now()
        if force or now >= self._details_due:
            self._details_due = now + self.source.details_seconds
            story, nodes = self.source.details(job)
            self.update(story=story, nodes=nodes)
        elif current := self.source.current_story(job):
            self.update(story=current)

    def _report(self, event: Event) -> None:
        self._handle(event)
        self._on_event(event)

    def _handle(self, event: Event) -> None:
        match event:
            case StateChanged(job=job):
                self._details_due = 0.0
                self.update(job=job, note="")
            case LinesPrinted(lines=lines):
                self._lines.extend(lines)
                self.update(lines=tuple(self._lines))
            case ProgressUpdated(progress=progress):
                self.update(progress=progress)
            case OutageStarted(target=target, problem=problem):
                self._troubles[target] = problem
                self.update(trouble=" ".join(self._troubles.values()))
            case OutageEnded(target=target):
                self._troubles.pop(target, None)
                self.update(trouble=" ".join(self._troubles.values()))
            case Note(text=text):
                self.update(note=text)

    def update(self, **changes: object) -> None:
        with self._lock:
            self._view = self._view._replace(**changes)  # type: ignore[arg-type]  # a field's name and its value


class DetailedView:
    """A JobView that also reads the story and the GPU samples with the progress, so that they share its poll intervals
    and outage reports."""

    def __init__(self, view: RunJobView, run: RunWatch) -> None:
        self._view, self._run = view, run

    def job(self) -> Job:
        """Return the job's current state."""
        return self._view.job()

    def lines(self) -> list[Line]:
        return self._view.lines()

    def progress(self) -> Progress | None:
        """Return the progress; read the story and the GPU samples if they are due."""
        progress = self._view.progress()
        self._run.update(newest_rows=self._view.newest_rows)
        try:
            if job := self._run.view.job:
                self._run.refresh(job)
        except LaunchError:
            if progress is None:  # else the progress, which is not read twice, would be lost
                raise
        return progress
