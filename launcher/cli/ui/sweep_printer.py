"""Print a line to stderr when a point of a sweep starts, changes its state, or ends."""

from __future__ import annotations

import sys
import threading

from launcher.cli.ui.event_printer import STATES, after, time_of_day
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import utc_stamp
from launcher.runs.sweep.events import PointChanged, cause_of
from launcher.runs.sweep.plan import SweepPlan


class SweepPrinter:
    """Prints each event of a sweep. May be called on several threads."""

    def __init__(self, sweep: SweepPlan) -> None:
        self._width = len(str(len(sweep.points)))
        self._count = len(sweep.points)
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Print a message of launch, of one or more lines."""
        with self._lock:
            say(text)

    def __call__(self, event: PointChanged) -> None:
        run, when = event.run, time_of_day()
        if run.had_ended:
            when = " " * len(when)
            cause = f": {cause_of(run)}" if run.error and run.state != "cancelled" else ""
            text = f"already {run.state}{f' on {utc_stamp(run.ended)}' if run.ended else ''}{cause}"
        elif event.kind == "ended":
            cause = f": {run.error.problem.splitlines()[0]}" if run.error and run.state != "cancelled" else ""
            text = f"{run.state}{after(run.job) if run.job else ''}{cause}"
        elif event.kind == "state" and run.job:
            text = STATES.get(run.job.state, run.job.state)
        else:
            place = f" in {run.job.place}" if run.job else ""
            text = f"{'started' if event.kind == 'started' else 'already started'}{place}"
        number = f"{run.point.number:>{self._width}}/{self._count}"
        self._print(f"{when}  {number}  {run.point.run}  {text}  ({run.point.text})")

    def _print(self, line: str) -> None:
        with self._lock:
            print(line, file=sys.stderr, flush=True)
