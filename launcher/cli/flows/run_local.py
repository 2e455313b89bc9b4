"""Run a job on this machine and print its output and its result."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from launch_train import runfolder
from launch_train.runfolder.starts import RunMetrics
from launcher.cli.options import Output
from launcher.cli.ui.event_printer import LinePrinter
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder
from launcher.runs.local_run import failure
from launcher.runs.run_folder import read_results
from launcher.runs.run_folder import restarts as restarts_in
from launcher.services.local.client import run_job
from launcher.services.local.job import Event, LocalJob, Message, Outcome, Printed, Started
from launcher.services.local.preemption import Preempted
from launcher.services.local.request import parse_request, with_image
from launcher.services.local.run_folder import start_text
from launcher.services.local.workdirs import WrittenFiles

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.cli.flows.suggestions import Typed
    from launcher.services.local.attempts import End
    from launcher.services.local.request import ParsedJob


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, to be printed. `end` may be that of an earlier command."""

    run: str
    folder: str | None
    end: End
    metrics: RunMetrics | None
    attempt: int = 0
    """Number of the attempt that `end` is the end of; 0: unknown."""
    images: tuple[str, ...] = ()
    """The images that ran in containers."""
    left: tuple[WrittenFiles, ...] = ()
    """Files that each start left in its working directories."""
    preempted: Preempted | None = None
    restarts: int = 0
    """How often the run's processes were restarted after a failure or a preemption."""
    report: str = ""
    """The page with its curves, if the run folder is on this machine."""


def run_here(job: LocalJob, output: Output, typed: Typed | None = None) -> None:
    """Run a job to its end and print the result. A run that has already succeeded is only printed. `typed`: the command
    line, for suggested commands; None for a request from a file.

    Raises:
        UsageError: the request cannot run here, or its run folder is unusable or in use.
        JobFailed: a replica exited with a code other than 0.
    """
    printer = LinePrinter()
    left: list[WrittenFiles] = []
    outcome: Outcome | None = None

    def on_event(event: Event) -> None:
        nonlocal outcome
        if isinstance(event, Started):
            printer.reset()
        elif isinstance(event, Message):
            say(event.text)
        elif isinstance(event, Printed):
            printer(event.replica, event.text)
        elif isinstance(event, WrittenFiles):
            left.append(event)
        elif isinstance(event, Outcome):
            outcome = event

    request = parse_request(with_image(job.request, job.image) if job.image else job.request)
    folder, name = request.run_folder, request.name or "the job"

    def show(outcome: Outcome, error: BaseException | None) -> None:
        storage = open_folder(folder) if folder else None
        results = read_results(storage)
        result = RunResult(
            run=name,
            folder=folder,
            end=outcome.end,
            metrics=results,
            attempt=outcome.attempt,
            images=request.images if job.docker else (),
            left=tuple(left),
            preempted=preempted_text(job, outcome, results),
            restarts=restarts_in(storage) if storage else printer.restarts,
            report=report_of(storage, is_written=outcome.is_earlier),
        )
        show_result(result, output, typed, error)

    try:
        ended = run_job(job, on_event)
    except KeyboardInterrupt as stop:
        text = stopped_text(request)
        stop.add_note(text)
        say(f"interrupted; {text}")
        if outcome and output is not Output.text:
            show(outcome, stop)
        raise
    error = None if ended.end.succeeded else failure(ended.end, name, folder, printer.cause)
    show(ended, error)
    if error:
        raise error


def stopped_text(request: ParsedJob) -> str:
    """Return what an interrupted job leaves, and how it continues."""
    if not request.run_folder:
        return "all processes were stopped; there is no run folder\nthe same command starts the job again"
    start = ""
    with suppress(LaunchError):
        start = f": {start_text(open_folder(request.run_folder), is_builtin=request.is_builtin)}"
    return (
        f"all processes were stopped; the run folder is {request.run_folder}\nthe same command continues the run{start}"
    )


def preempted_text(job: LocalJob, outcome: Outcome, results: RunMetrics | None) -> Preempted | None:
    """Return how the run resumed after its preemption; None: it was not preempted."""
    if outcome.preempted is None or job.preempt_after is None:
        return None
    resumption = (results or RunMetrics(starts=())).resumption(outcome.attempt)
    return Preempted(after=job.preempt_after, exit_codes=dict(outcome.preempted), resumption=resumption)


def report_of(storage: Storage | None, *, is_written: bool) -> str:
    """Return the path of the report of a run whose folder is on this machine, written first unless it `is_written`;
    empty for other runs."""
    from launch_train.common.storage import LocalFolder
    from launcher.cli.flows.report import write_report

    if not isinstance(storage, LocalFolder):
        return ""
    if is_written and (path := Path(storage.url, runfolder.REPORT)).is_file():
        return str(path)
    try:
        return str(write_report({"": storage}))
    except Exception as error:  # noqa: BLE001 - a script's metrics may hold anything, and the run has succeeded
        say(f"report not written: {getattr(error, 'problem', error)}")
        return ""


def show_result(result: RunResult, output: Output, typed: Typed | None, error: BaseException | None) -> None:
    """Print the result to stdout. `error` ends the command."""
    from launcher.cli.flows.suggestions import next_commands
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import results_data, summary_lines

    end = result.end
    if output is Output.text:
        preempted = result.preempted.text() if result.preempted else ""
        images = ", ".join(result.images)
        name = f"{result.run} (attempt {result.attempt})" if result.attempt > 1 else result.run
        ended = (name, result.folder, end.succeeded, end.seconds, result.metrics)
        how = f"was {end.stopped} after" if end.stopped else ""
        print("\n".join(summary_lines(*ended, preempted, images, how, restarts=result.restarts, report=result.report)))
        if end.succeeded:
            commands = [*next_commands(typed, result.folder, has_metrics=bool(result.metrics and result.metrics.rows))]
            if commands:
                print("\n".join(["", "next", *(f"  {command}\n      {why}" for command, why in commands)]))
        return
    data = {
        "run": result.run,
        "state": "SUCCEEDED" if end.succeeded else end.stopped.upper() or "FAILED",
        "exit_codes": end.exit_codes,
        "seconds": end.seconds,
        "run_folder": result.folder,
        "report": result.report or None,
        **results_data(result.metrics, end.time),
        "restarts": result.restarts,
        "error": None,
    }
    if result.images:
        data["images"] = list(result.images)
    if result.left:
        data["left_behind"] = [
            {
                "folder": left.folder and str(left.folder),
                "files": left.files,
                **({"problem": left.problem} if left.problem else {}),
            }
            for left in result.left
        ]
    if result.preempted:
        data["preemption"] = result.preempted.as_data()
    printed(data, output, error)
