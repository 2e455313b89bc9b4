"""Print the events of a run to stderr while it is followed: attempts, states, log lines, progress."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launch_train.common.text import elapsed
from launcher.cli.ui.job_text import console_url, machine_of, provisioning_of
from launcher.cli.ui.plan_page import expected_price
from launcher.cli.ui.progress_bars import progress, report_to
from launcher.cli.ui.streams import CLEAR
from launcher.cli.ui.text import LABEL, WIDTH, fitted, labelled
from launcher.diagnosis.output_cause import CauseFinder
from launcher.images.pipeline import Report
from launcher.jobs.job import GONE, Job
from launcher.plan.model import Attempt, Plan
from launcher.project.model import Check
from launcher.project.report import lines
from launcher.runs.driver import AttemptFailed, AttemptStarted
from launcher.runs.metrics.progress import Progress
from launcher.services.request import read
from launcher.text import usd_text

EVERY_SECONDS = 30.0
"""Shortest time between progress lines without a terminal; the last step is always reported."""
WHAT = {"job": "job state", "lines": "log lines", "progress": "progress"}
PLAIN_STATES = ("QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED", "PAUSED", "STOPPED", "INTERRUPTED", "UNKNOWN")
STATES = {
    **{state: state.lower() for state in PLAIN_STATES},
    "PENDING": "waiting for capacity",
    "CANCELLING": "being cancelled",
    "EXPIRED": "expired: time limit reached",
    "UPDATING": "being updated",
    "PARTIALLY_SUCCEEDED": "partially succeeded",
    GONE: "deleted",
}


class LinePrinter(CauseFinder):
    """Prints lines of all replicas to stderr with the replica's name as prefix, and finds the cause of a failure."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self._prefix = prefix
        self._lock = threading.Lock()

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"{self._prefix}[{replica}] {line}", file=sys.stderr, flush=True)
            self.add(replica, line)


class EventPrinter:
    """Prints each event. `plan` is None if only one job is followed.

    On a terminal the progress line stays at the bottom: it is erased before each other line and redrawn below it.
    """

    def __init__(self, plan: Plan | None, prefix: str = "") -> None:
        """`prefix` begins each line, where several runs are followed."""
        self._plan, self._prefix = plan, prefix
        self._printer = LinePrinter(prefix)
        self._tty = sys.stderr.isatty() and not prefix
        self._shown = ""
        self._last = float("-inf")
        self._bound_is_printed = False

    def say(self, text: str) -> None:
        """Print a message of launch, of one or more lines."""
        for line in fitted(text, len("launch: ")).splitlines():
            self._print(f"launch: {line}")

    def __call__(self, event: Any) -> None:
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
        getattr(self, f"_{kind}")(event)

    def show_checks(self, checks: tuple[Check, ...]) -> None:
        if problems := [check for check in checks if check.status in ("failed", "warning")]:
            self.say("preflight checks:")
            print("\n".join(lines(problems)), file=sys.stderr)
        if unknown := list(dict.fromkeys(check.name for check in checks if check.status == "unknown")):
            self.say(f"preflight: not checked: {', '.join(unknown)} (--preflight shows why)")

    @contextmanager
    def building(self) -> Iterator[Report]:
        """Yield the receiver of an image's progress: bars on a terminal, else lines."""
        with progress() as bars:
            yield report_to(bars)

    def close(self) -> None:
        """End the progress line."""
        if self._shown:
            print(file=sys.stderr)
            self._shown = ""

    # --- Events of the driver -----------------------------------------------------------------------------------------

    def _attempt_started(self, event: AttemptStarted) -> None:
        self.close()  # the progress of the last attempt
        if event.job.is_here:  # its end names the folder
            return
        job, planned = event.job, attempt_of(self._plan, event.job)
        number = f"{event.number}: " if event.number else ""
        there = "" if event.created else " (already exists)"
        where = f"on {job.place}" if job.target == "on" else f"{provisioning_of(job)} in {job.place}, {machine_of(job)}"
        price = f", {expected_price(planned)}" if planned else ""
        self._print_labelled("attempt", f"{number}{where}{price}{there}")
        self._print(f"{'vm' if event.job.zone else 'job':{LABEL}}{event.job.name}")  # in one piece, to be copied
        if url := console_url(event.job):
            self._print(f"{'':{LABEL}}{url}")
        if self._plan and self._plan.command and event.created and not self._bound_is_printed:
            self._bound_is_printed = True
            limits = self._plan.limits
            about = "" if limits.usd_expected is None else f"{usd_text(limits.usd_expected, approx=True)}, "
            bound = "no upper bound: a price is unknown"
            if limits.usd_at_most is not None:
                bound = f"at most {usd_text(limits.usd_at_most)}"
            self._print_labelled("cost", f"{about}{bound} ({limits.hours:g} h of billed time)")

    def _attempt_failed(self, event: AttemptFailed) -> None:
        diagnosis = event.diagnosis
        self._print_labelled("ended", diagnosis.cause)
        if diagnosis.scope not in ("permanent", "project") and diagnosis.fix:
            self._print_labelled("", diagnosis.fix)

    # --- Events of the watch ------------------------------------------------------------------------------------------

    def _state_changed(self, event: Any) -> None:
        job = event.job
        self._print(f"{time_of_day()}  {STATES.get(job.state, job.state)}{after(job)}")

    def _lines_printed(self, event: Any) -> None:
        self._wipe()
        for line in event.lines:
            self._printer(line.replica, line.text)
        self._draw()

    def _progress_updated(self, event: Any) -> None:
        text = f"{time_of_day()}  {progress_text(event.progress)}"
        if self._tty:
            self._shown = text[: width() - 1]  # a wrapped line could not be erased
            self._draw()
        elif time.monotonic() - self._last >= EVERY_SECONDS or event.progress.step == event.progress.steps:
            self._last = time.monotonic()
            self._print(text)

    def _outage_started(self, event: Any) -> None:
        what = WHAT[event.target]
        self._print_labelled("trouble", f"{what} temporarily unavailable; the job is still running, retrying")
        for part in event.problem.splitlines():
            self._print_labelled("", part)

    def _outage_ended(self, event: Any) -> None:
        self._print(f"{time_of_day()}  {WHAT[event.target]} available again after {elapsed(event.seconds)}")

    def _note(self, event: Any) -> None:
        self._print_labelled("note", event.text)

    # --- The terminal -----------------------------------------------------------------------------------------------

    def _print(self, line: str) -> None:
        self._wipe()
        print(f"{self._prefix}{line}", file=sys.stderr, flush=True)
        self._draw()

    def _print_labelled(self, label: str, text: str) -> None:
        for line in labelled(label, text):
            self._print(line)

    def _wipe(self) -> None:
        if self._shown:
            print(CLEAR, end="", file=sys.stderr)

    def _draw(self) -> None:
        if self._shown:
            print(f"{CLEAR}{self._shown}", end="", file=sys.stderr, flush=True)


def width() -> int:
    """Return the width of the terminal in columns."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    except (OSError, ValueError):  # not a terminal, or no file descriptor
        return WIDTH


def time_of_day() -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S")


def attempt_of(plan: Plan | None, job: Job) -> Attempt | None:
    """Return the planned attempt that a job belongs to, or None."""
    requested = read(job.request)
    wanted = (job.place, requested.provisioning.partition(":")[0], requested.machine_type)
    for attempt in plan.attempts if plan else ():
        if (attempt.where, attempt.provisioning.partition(":")[0], attempt.machine_type) == wanted:
            return attempt
    return None


def after(job: Job) -> str:
    """Return how long a running job waited for its start, or how long an ended job ran."""
    if job.state == "RUNNING" and job.started and job.started > job.begun:
        return f" ({elapsed(max(0.0, job.started - job.created))} after creation)"
    if job.has_ended and job.ended and job.started:
        return f" after {elapsed(max(0.0, job.ended - job.started))}"
    return ""


def progress_text(progress: Progress) -> str:
    """Return `step 120 of 2,000, loss 3.2134, 412,345 tokens/s, 12 min left`."""
    parts = [f"step {progress.step:,}" + (f" of {progress.steps:,}" if progress.steps else "")]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.rate is not None:
        parts.append(f"{progress.rate:,.{0 if progress.rate >= 100 else 2}f} {progress.unit}/s")
    if progress.eta_seconds is not None and progress.step != progress.steps:
        parts.append(f"{elapsed(progress.eta_seconds)} left")
    return ", ".join(parts)
