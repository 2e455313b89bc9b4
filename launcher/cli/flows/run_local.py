"""Run a job on this machine and print its output and its result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launch_train.runfolder.starts import RunMetrics
from launcher.cli.flows.report import write_report
from launcher.cli.flows.suggestions import Typed, next_commands, typed_program, typed_words
from launcher.cli.options import Output
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import LinePrinter
from launcher.cli.ui.run_summary import results_data, summary_lines
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.gcp.storage import open_folder
from launcher.runs.local_run import failure
from launcher.runs.run_folder import read_results
from launcher.runs.run_folder import restarts as restarts_in
from launcher.services.local.client import run_job
from launcher.services.local.job import Event, LocalJob, Message, Outcome, Printed, Started
from launcher.services.local.preemption import Preempted
from launcher.services.local.request import ParsedJob, parse_request, with_image
from launcher.services.local.run_folder import start_text
from launcher.services.local.run_folder_job import shown
from launcher.services.local.workdirs import WrittenFiles


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
    show = partial(show_result, job, request, left, printer, output, typed)
    try:
        ended = run_job(job, on_event)
    except KeyboardInterrupt as stop:
        text = stopped_text(job, request, typed)
        stop.add_note(text)
        say(f"interrupted; {text}")
        if outcome and output is not Output.text:
            with suppress(LaunchError):  # the folder cannot be read, as without a network
                show(outcome, stop)
        raise
    error = None
    if not ended.end.succeeded:
        error = failure(ended.end, request.name or "the job", request.run_folder, printer.cause)
    show(ended, error)
    if error:
        raise error


def stopped_text(job: LocalJob, request: ParsedJob, typed: Typed | None) -> str:
    """Return what an interrupted job leaves, and the command that continues it."""
    folder, resume, start = request.run_folder, "the same command resumes it", ""
    if not folder:
        return "all processes were stopped; there is no run folder\nthe same command starts the job again"
    if typed and not folder.startswith("gs://"):  # with --new, the same command would start another run
        how = ["--docker"] * job.docker + ["--in-place"] * bool(job.code.in_place)
        words = typed_words(typed.spec, typed.flags._replace(run_id=None, output=None))
        resume = shlex.join([typed_program(), "local", *words, *how, "--resume", shown(Path(folder))])
    with suppress(LaunchError):  # the folder cannot be read
        start = f"\n    {start_text(open_folder(folder), is_builtin=request.is_builtin)}"
    return f"all processes were stopped; the run folder is {folder}\n{resume}{start}"


def report_of(storage: Storage | None, *, is_written: bool) -> str:
    """Return the path of the report of a run whose folder is on this machine, written first unless it `is_written`;
    empty for other runs."""
    if not isinstance(storage, LocalFolder):
        return ""
    if is_written and (path := Path(storage.url, runfolder.REPORT)).is_file():
        return str(path)
    try:
        return str(write_report({"": storage}))
    except Exception as error:  # noqa: BLE001 - a script's metrics may hold anything, and the run has succeeded
        say(f"report not written: {getattr(error, 'problem', error)}")
        return ""


def show_result(
    job: LocalJob,
    request: ParsedJob,
    left: Sequence[WrittenFiles],
    printer: LinePrinter,
    output: Output,
    typed: Typed | None,
    outcome: Outcome,
    error: BaseException | None,
) -> None:
    """Print the result of a job to stdout. `left`: what each start left in its working directories; `error` ends the
    command."""
    end, folder, run = outcome.end, request.run_folder, request.name or "the job"
    storage = open_folder(folder) if folder else None
    results = read_results(storage)
    restarts = restarts_in(storage) if storage else printer.restarts
    report = report_of(storage, is_written=outcome.is_earlier)
    images = request.images if job.docker else ()
    preempted = None
    if outcome.preempted is not None and job.preempt_after is not None:
        resumption = (results or RunMetrics(starts=())).resumption(outcome.attempt)
        preempted = Preempted(after=job.preempt_after, exit_codes=dict(outcome.preempted), resumption=resumption)
    if output is Output.text:
        name = f"{run} (attempt {outcome.attempt})" if outcome.attempt > 1 else run
        ended = (name, folder, end.succeeded, end.seconds, results, preempted.text() if preempted else "")
        how = f"was {end.stopped} after" if end.stopped else ""
        print("\n".join(summary_lines(*ended, ", ".join(images), how, restarts=restarts, report=report)))
        if end.succeeded:
            commands = [*next_commands(typed, folder, has_metrics=bool(results and results.rows))]
            if commands:
                print("\n".join(["", "next", *(f"  {command}\n      {why}" for command, why in commands)]))
        return
    data = {
        "run": run,
        "state": "SUCCEEDED" if end.succeeded else end.stopped.upper() or "FAILED",
        "exit_codes": end.exit_codes,
        "seconds": end.seconds,
        "run_folder": folder,
        "report": report or None,
        **results_data(results, end.time),
        "restarts": restarts,
        "error": None,
    }
    if images:
        data["images"] = list(images)
    if left:
        data["left_behind"] = [
            {
                "folder": files.folder and str(files.folder),
                "files": files.files,
                **({"problem": files.problem} if files.problem else {}),
            }
            for files in left
        ]
    if preempted:
        data["preemption"] = preempted.as_data()
    printed(data, output, error)
