"""Print the log of a job to stdout."""

from __future__ import annotations

import json
import sys

from launcher.cli.options import Output
from launcher.cli.ui.event_printer import EventPrinter
from launcher.errors import UsageError
from launcher.jobs.job import Job
from launcher.runs.context import LineReader
from launcher.runs.find import FoundRun
from launcher.runs.logs.line import Line
from launcher.runs.metrics.progress import Progress
from launcher.runs.run_folder import storage_of
from launcher.runs.watch import Event, LinesPrinted, Note, OutageEnded, OutageStarted, intervals_of, watch
from launcher.services import request
from launcher.services.base import Jobs


class PlainView:
    """A JobView of a job's state, and of its log lines if there is a reader."""

    def __init__(self, service: Jobs, job: Job, lines: LineReader | None = None) -> None:
        self._service, self._name, self._lines = service, job.name, lines

    def job(self) -> Job:
        """Return the job's current state."""
        return self._service.get(self._name)

    def lines(self) -> list[Line]:
        return self._lines.read_new() if self._lines else []

    def progress(self) -> Progress | None:
        """Return None: it shows no progress."""
        return None


def print_log(run: FoundRun, job: Job, output: Output, *, tail: int | None, follow: bool) -> None:
    """Print all lines, or the last `tail`; with `follow`, print new ones until the job ends. Raises LaunchError."""
    if output is Output.yaml:
        raise UsageError("-o yaml is not available for logs", "Use -o text or -o json.")
    printer, context, folder = EventPrinter(None), run.context, storage_of(request.run_folder(job.request))
    # On this machine the run is one job, whose attempts all wrote to its folder.
    before = context.attempts(folder)[:-1] if job.is_here and folder and tail is None else ()
    for attempt in before:
        for line in context.open_log(job, folder, printer.say, attempt=attempt.number).read_existing():
            print_line(line, output)
    lines = context.open_log(job, folder, printer.say, tail=tail)
    for line in lines.read_existing():
        print_line(line, output)
    if not follow or job.has_ended:
        return

    def tell(event: Event) -> None:
        if isinstance(event, OutageStarted | OutageEnded | Note):
            printer(event)
        for line in event.lines if isinstance(event, LinesPrinted) else ():
            print_line(line, output)
        sys.stdout.flush()

    service = context.of_run(folder)
    intervals = intervals_of(service.poll_seconds)
    watch(PlainView(service, job, lines), tell, context.clock, wait_seconds=None, intervals=intervals)


def print_line(line: Line, output: Output) -> None:
    print(json.dumps(line._asdict(), ensure_ascii=False) if output is Output.json else f"[{line.replica}] {line.text}")
