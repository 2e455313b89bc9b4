"""What a person sees while a run is followed: attempts, states, the job's own lines and how far it is, on stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from launcher.cli.ui.line_printer import LinePrinter
from launcher.cli.ui.plan_page import LABEL, WIDTH, fitted, labelled
from launcher.cli.ui.text import elapsed
from launcher.jobs.job import GONE

if TYPE_CHECKING:
    from launcher.jobs.job import Job
    from launcher.plan.model import Attempt, Plan
    from launcher.runs.attempts import Entry
    from launcher.runs.driver import AttemptFailed, AttemptStarted
    from launcher.runs.watch.loop import Progress

EVERY_SECONDS = 30.0
"""Between two lines about progress where they can't be written over each other; the last step is always reported."""
WHAT = {"job": "the job's state", "lines": "its lines", "progress": "its progress"}
CLEAR = "\r\x1b[K"
STATES = {
    "QUEUED": "queued",
    "PENDING": "waits for machines",
    "RUNNING": "runs",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "CANCELLING": "is being cancelled",
    "CANCELLED": "was cancelled",
    "PAUSED": "is paused",
    "STOPPED": "is stopped",
    "EXPIRED": "has expired: its time limit is over",
    "UPDATING": "is being updated",
    "PARTIALLY_SUCCEEDED": "succeeded in part",
    GONE: "was deleted",
}


class EventPrinter:
    """Called with each event. `plan` is None where only a job is followed.

    On a terminal the newest line about progress stays the last one: it is wiped before any other, and drawn anew below.
    """

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._printer = LinePrinter()
        self._tty = sys.stderr.isatty()
        self._shown = ""
        self._last = float("-inf")

    @property
    def error(self) -> str:
        """What the job's lines since its newest start name as the cause of its end; empty where they name none."""
        return str(self._printer.cause or "")

    def say(self, text: str) -> None:
        """A line of launch's own, or several."""
        for line in fitted(text, len("launch: ")).splitlines():
            self._print(f"launch: {line}")

    def __call__(self, event: Any) -> None:
        """Something has happened."""
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
        getattr(self, f"_{kind}")(event)

    def close(self) -> None:
        """Nothing more is to come: the line about progress stays."""
        if self._shown:
            print(file=sys.stderr)
            self._shown = ""

    # --- Of the driver ----------------------------------------------------------------------------------------------

    def _attempt_started(self, event: AttemptStarted) -> None:
        from launcher.cli.ui.job_text import console_url

        planned = attempt_of(self._plan, event.job)
        self.close()  # how far another attempt was says nothing of this one
        number = f"{event.number}: " if event.number else ""
        there = "" if event.created else " (already there)"
        for line in labelled("attempt", f"{number}{place_text(event.job, planned)}{there}"):
            self._print(line)
        self._print(f"{'vm' if event.job.zone else 'job':{LABEL}}{event.job.name}")  # in one piece, to be copied
        self._print(f"{'':{LABEL}}{console_url(event.job)}")
        self._printer.reset()

    def _attempt_failed(self, event: AttemptFailed) -> None:
        diagnosis = event.diagnosis
        for line in labelled("ended", diagnosis.cause):
            self._print(line)
        if diagnosis.scope not in ("permanent", "project") and diagnosis.fix:
            for line in labelled("", diagnosis.fix):
                self._print(line)

    # --- Of the watch -----------------------------------------------------------------------------------------------

    def _state_changed(self, event: Any) -> None:
        job = event.job
        self._print(f"{clock()}  {STATES.get(job.state, job.state)}{after(job)}")

    def _lines_printed(self, event: Any) -> None:
        self._wipe()
        for line in event.lines:
            self._printer(line.replica, line.text)
        self._draw()

    def _progress_updated(self, event: Any) -> None:
        text = f"{clock()}  {progress_text(event.progress)}"
        if self._tty:
            self._shown = text[: width() - 1]  # a line that is wrapped could not be wiped
            self._draw()
        elif time.monotonic() - self._last >= EVERY_SECONDS or event.progress.step == event.progress.steps:
            self._last = time.monotonic()
            self._print(text)

    def _outage_started(self, event: Any) -> None:
        what = WHAT[event.target]
        for line in labelled("trouble", f"{what} can't be seen just now; the job goes on, and it is asked again"):
            self._print(line)
        for part in event.problem.splitlines():
            for line in labelled("", part):
                self._print(line)

    def _outage_ended(self, event: Any) -> None:
        self._print(f"{clock()}  {WHAT[event.target]} can be seen again, after {elapsed(event.seconds)}")

    def _note(self, event: Any) -> None:
        for line in labelled("note", event.text):
            self._print(line)

    # --- The terminal -----------------------------------------------------------------------------------------------

    def _print(self, line: str) -> None:
        self._wipe()
        print(line, file=sys.stderr, flush=True)
        self._draw()

    def _wipe(self) -> None:
        if self._shown:
            print(CLEAR, end="", file=sys.stderr)

    def _draw(self) -> None:
        if self._shown:
            print(f"{CLEAR}{self._shown}", end="", file=sys.stderr, flush=True)


def width() -> int:
    """The terminal's columns."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError):  # no terminal, or none with a file behind it
        return WIDTH


def clock() -> str:
    """The time of day here."""
    return time.strftime("%H:%M:%S")


def attempt_of(plan: Plan | None, job: Job) -> Attempt | None:
    """The plan's attempt that a job is."""
    from launcher.backend.request import provisioning

    wanted = (job.place, provisioning(job.request).partition(":")[0])
    for one in plan.attempts if plan else ():
        if (one.where, one.provisioning.partition(":")[0]) == wanted:
            return one
    return None


def place_text(job: Job, planned: Attempt | None) -> str:
    """`flex-start in us-central1, a3-highgpu-2g, ≈$12.87/h`."""
    from launcher.cli.ui.job_text import machine_of, provisioning_of
    from launcher.cli.ui.plan_page import expected_price

    price = f", {expected_price(planned)}" if planned else ""
    return f"{provisioning_of(job)} in {job.place}, {machine_of(job)}{price}"


def after(job: Job) -> str:
    """How long it took from the creation to the start, and from there to the end."""
    if job.state == "RUNNING" and job.started:
        return f" ({elapsed(max(0.0, job.started - job.created))} after its creation)"
    if job.has_ended and job.ended and job.started:
        return f" after {elapsed(max(0.0, job.ended - job.started))}"
    return ""


def progress_text(progress: Progress) -> str:
    """`step 120 of 2,000, loss 3.2134, 412,345 tokens/s, 12 min left`."""
    parts = [f"step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else "")]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.rate is not None:
        parts.append(f"{progress.rate:,.{0 if progress.rate >= 100 else 2}f} {progress.unit}/s")
    if progress.eta_seconds is not None and progress.step != progress.steps:
        parts.append(f"{elapsed(progress.eta_seconds)} left")
    return ", ".join(parts)


def attempted(entry: Entry) -> str:
    """`1. flex-start in us-central1: no capacity`."""
    where = f"{entry.number}. {entry.provisioning or 'a rehearsal'} in {entry.where or 'this folder'}"
    if entry.end is None:
        return f"{where}: under way" if entry.job else f"{where}: being created"
    return f"{where}: {entry.end.cause or entry.end.kind}"
