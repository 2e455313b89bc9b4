"""Run a request on this machine and print the result."""

from __future__ import annotations

import fnmatch
import gc
import glob
import os
import posixpath
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.faults import NEEDS_GPU
from launcher.cli.options import Output
from launcher.cli.ui.line_printer import LinePrinter
from launcher.cli.ui.streams import say
from launcher.diagnosis.output_cause import Cause
from launcher.errors import JobFailed, LaunchError
from launcher.runs.run_folder import read_results
from launcher.runs.run_folder import restarts as restarts_in
from launcher.services.local import preemption, run_folder
from launcher.services.local.attempts import End
from launcher.services.local.preemption import Preempted, ReplicaExits
from launcher.services.local.workdirs import Code
from launcher.signals import Stopped
from launcher.text import relative

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launch_train.runfolder.starts import RunMetrics
    from launcher.cli.flows.suggestions import Typed
    from launcher.inputs.interpreter import Interpreter
    from launcher.plan.model import Plan
    from launcher.services.local.request import ParsedJob
    from launcher.services.local.supervisor import Ended, Preemption
    from launcher.services.local.workdirs import WrittenFiles


WORKDIRS = "workdirs"
"""Folder in a local run folder with the files that each start left in its working directory, by number."""
MOST_NAMED = 3
"""Maximum number of files that a message names."""


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """A job to run: a request, the user's code, and the plan that the request comes from (or None)."""

    request: dict[str, Any]
    code: Code = Code()
    content: str = ""
    """The digest of the code."""
    plan: Plan | None = None
    typed: Typed | None = None
    """The spec and the flags of the command line, for suggested commands; None for a request from a file."""
    preempt_after: float | None = None
    """Seconds from the replicas' start to a preemption."""
    docker: bool = False
    """Run containers of the image, with the code in the image, instead of processes."""
    image: str | None = None
    """The image to run (default: the request's)."""
    python: Interpreter | None = None
    """The Python that runs processes; None with `docker`."""
    job_id: str | None = None
    """The ID of a job that another process submitted, which owns the run folder and its locks (--as-job)."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, to be printed. `end` may be that of an earlier command."""

    run: str
    folder: str | None
    end: End
    found: RunMetrics | None
    images: tuple[str, ...] = ()
    """The images that ran in containers."""
    left: tuple[WrittenFiles, ...] = ()
    """Files that each start left in its working directories."""
    preempted: Preempted | None = None
    restarts: int = 0
    """How often the run's processes were restarted after a failure or a preemption."""
    report: str = ""
    """The page with its curves, if the run folder is on this machine."""


def run(job: Rehearsal, output: Output) -> None:
    """Run a job to its end and print the result. A run that has already succeeded is only printed.

    Raises:
        UsageError: the request cannot run here, or its run folder is unusable or in use.
        JobFailed: a replica exited with a code other than 0.
    """
    from launcher.inputs.interpreter import OWN
    from launcher.services.local.on_host import check_program
    from launcher.services.local.request import fingerprint, parse_request, with_image

    gc.enable()  # the process lives as long as the job from here on
    request = parse_request(with_image(job.request, job.image) if job.image else job.request)
    if job.job_id:
        run_attempt(job, request, None, 0, output)
        return
    if job.python:
        check_program(request, job.code, os.environ, job.python.path)
    what = fingerprint(request, content(job, request))
    with run_folder.opened(request.run_folder) as storage:
        before = run_folder.ended_well(storage, what) if storage else None
        if before:
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(before.time))
            again = "--output DIR" if job.plan is None else "--new"
            say(f"this run finished on {when} UTC; nothing to do ({again} runs it again)")
            show(page(job, request, before, storage, has_report=True), job, output)
        else:
            if job.docker:  # before anything is written: without an engine or an image there is no attempt
                from launcher.services.local.in_docker import ensure_images

                ensure_images(request, os.environ, say)
            attempt = 0
            if storage:
                # launch's own is not recorded: an environment that is activated afterwards is used.
                python = job.python.path if job.python and job.python.origin != OWN else ""
                attempt = run_folder.prepare(storage, job.plan, job.request, request, what, say, python)
            run_attempt(job, request, storage, attempt, output)


def content(job: Rehearsal, request: ParsedJob) -> str:
    """Return the identity of the code: its digest, or the images that contain it."""
    return " ".join(request.images) if job.docker and not job.plan else job.content


def run_attempt(job: Rehearsal, request: ParsedJob, storage: Storage | None, attempt: int, output: Output) -> None:
    """Run one attempt (0 without a run folder), record its end, and print the result. Raises JobFailed."""
    from launcher.services.local.cancel import stopped_by_cancel

    if job.docker:
        for image in request.images:
            say(f"running in containers of {image}")
    else:
        say_substitutes(job)
    printer, begun = LinePrinter(), time.monotonic()
    left: list[WrittenFiles] = []
    with stopped_by_cancel(storage, attempt) as cancelled:
        try:
            ran = rehearse(job, request, printer, left.append)
        except Stopped:
            if not cancelled.is_set():
                raise
            raise JobFailed(
                f"{request.name} was cancelled", "The same command resumes it from its newest checkpoint."
            ) from None
    end = End(exit_codes=ran.exit_codes, seconds=time.monotonic() - begun, time=time.time())
    if storage:
        run_folder.record_end(storage, attempt, end, say)
    shown = page(job, request, end, storage, printer.restarts)
    shown = msgspec.structs.replace(shown, left=tuple(left))
    if ran.preempted is not None and job.preempt_after is not None:
        from launch_train.runfolder.starts import RunMetrics

        resumption = (shown.found or RunMetrics(starts=())).resumption(attempt)
        preempted = Preempted(after=job.preempt_after, exit_codes=ran.preempted, resumption=resumption)
        shown = msgspec.structs.replace(shown, preempted=preempted)
    error = None if end.succeeded else failure(end, request.run_folder, printer.cause)
    show(shown, job, output, error)
    if error:
        raise error


def say_substitutes(job: Rehearsal) -> None:
    """Print what replaces the image: this Python's packages and this machine's files."""
    from launcher.cli.ui.plan_page import NO_IMAGE

    if job.code.in_place:
        say(f"running in {job.code.in_place} itself, including files that the image would exclude")
    say(f"image not used: runs with {job.python.text}" if job.python and not job.job_id else f"image {NO_IMAGE}")
    if job.plan and job.plan.spec.get("image", {}).get("uri"):
        say("the code in your custom image is not available here; running in an empty folder")


def rehearse(
    job: Rehearsal, request: ParsedJob, printer: LinePrinter, on_left: Callable[[WrittenFiles], None]
) -> ReplicaExits:
    """Run the replicas and print their output to stderr; after Ctrl-C, name the run folder."""
    job_id = job.job_id or str(time.time_ns())

    def say_left(left: WrittenFiles) -> None:
        on_left(left)
        if not job.job_id and (lost := left_text(left, job.plan)):
            say(lost)

    try:
        with starter(job, request, say_left) as start_job:

            def start(preempted: Preemption | None) -> Ended:
                printer.reset()
                return start_job(request, job_id=job_id, environ=os.environ, on_line=printer, preemption=preempted)

            return preemption.run(start, job.preempt_after, say, builtin=request.is_builtin)
    except KeyboardInterrupt as stop:
        where = f"the run folder is {request.run_folder}" if request.run_folder else "there is no run folder"
        stop.add_note(f"all processes were stopped; {where}")
        say(f"interrupted; all processes were stopped; {where}")
        raise


@contextmanager
def starter(
    job: Rehearsal, request: ParsedJob, on_left: Callable[[WrittenFiles], None]
) -> Iterator[Callable[..., Ended]]:
    """Yield the function that starts the replicas: as containers, or as processes with the user's code."""
    if job.docker:
        from launcher.services.local.in_docker import rehearse as in_containers

        yield partial(in_containers, say=say, on_left=on_left)
        return
    from launcher.services.local.on_host import rehearse as as_processes
    from launcher.services.local.workdirs import snapshot

    keep = None if job.job_id else partial(folder_for_left, request.run_folder)
    with snapshot(job.code._replace(keep=keep)) as code:
        yield partial(
            as_processes, code=code, say=say, on_left=on_left, python=job.python.path if job.python else sys.executable
        )


def folder_for_left(run_folder: str | None) -> Path:
    """Create the folder for the files that a start left: in a local run folder, otherwise a temporary one."""
    from launcher.services.local.workdirs import make_numbered_folder

    if run_folder and not run_folder.startswith("gs://"):
        return make_numbered_folder(Path(run_folder) / WORKDIRS)
    return Path(tempfile.mkdtemp(prefix="launch-workdirs-"))


def left_text(left: WrittenFiles, plan: Plan | None = None) -> str:
    """Return `written to the working directory, which a job loses: out/ckpt.pt (10 MB); moved to runs/a/workdirs/1`.

    The event files that the plan uploads (run.metrics.tensorboard) are not lost. Empty if no others were left.
    """
    from launcher.text import size_text

    metrics = (plan.spec.get("run") or {}).get("metrics") if plan and plan.run_folder else None
    folder = (metrics or {}).get("tensorboard")
    uploaded = posixpath.normpath(posixpath.join("*", glob.escape(folder), contract.EVENT_FILES)) if folder else ""
    lost = [name for name in left.files if not fnmatch.fnmatch(name, uploaded)]
    largest = sorted(lost, key=lambda name: -left.files[name])[:MOST_NAMED]
    if not largest:
        return ""
    named = ", ".join(
        f"{os.fsencode(name).decode(errors='replace')} ({size_text(left.files[name])})" for name in largest
    )
    more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    where = f"moved to {relative(str(left.folder))}" if left.folder else "not kept"
    where += f", except some: {left.problem}" if left.problem else ""
    return f"written to the working directory, which a job loses: {named}{more}; {where}"


def page(
    job: Rehearsal,
    request: ParsedJob,
    end: End,
    storage: Storage | None,
    restarts: int = 0,
    *,
    has_report: bool = False,
) -> RunResult:
    """Return the result of a run; `restarts` counts this command's restarts and is used without a run folder.
    `has_report`: its report was written when it ended."""
    return RunResult(
        run=request.name or "the job",
        folder=request.run_folder,
        end=end,
        found=read_results(storage),
        images=request.images if job.docker else (),
        restarts=restarts_in(storage) if storage else restarts,
        report=report_of(storage, is_written=has_report),
    )


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


def failure(end: End, folder: str | None, cause: Cause | None) -> JobFailed:
    """Return the error of a failed job: its cause, if its output names one, and the replica's exit code."""
    failed = {name: code for name, code in end.exit_codes.items() if code}
    name = cause.replica if cause and cause.replica in failed else next(iter(failed))
    code = failed[name]
    how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    ended = "the job was stopped" if code == contract.Exit.PREEMPTED else "the job failed"
    hint = [f"{name} {how}"] if cause else []
    if cause and NEEDS_GPU in cause.text:
        hint += ["This machine has no GPU. Use the CPU if torch.cuda.is_available() is false,"]
        hint += ["or run the job on Google Cloud (launch vertex, launch vm)."]
    hint += ["The same command resumes from there."] if code == contract.Exit.PREEMPTED else []
    hint += [f"See the output above{f'; the run folder is {folder}' if folder else ''}."]
    return JobFailed(f"{ended}: {cause.text if cause else f'{name} {how}'}", "\n".join(hint))


def meaning(code: int) -> str:
    """Return the meaning of an exit code of the contract, or the signal that killed a container, or nothing."""
    words = {
        contract.Exit.USAGE: "invalid config or code",
        contract.Exit.UNFIT: "this machine failed a check",
        contract.Exit.PREEMPTED: "interrupted; checkpoint saved",
        contract.Exit.DISAGREED: "the ranks' parameters differ",
        contract.Exit.SUPERSEDED: "another start of this run took over",
        contract.Exit.TERMINAL: "the run folder says that the run failed permanently",
    }
    if code - 128 in {*signal.Signals}:  # the convention of shells and container engines
        return f" ({signal.Signals(code - 128).name})"
    return next((f" ({text})" for known, text in words.items() if known == code), "")


def show(shown: RunResult, job: Rehearsal, output: Output, error: LaunchError | None = None) -> None:
    """Print the result to stdout. `error` ends the command."""
    from launcher.cli.flows.suggestions import next_commands
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import as_data, lines

    end, found = shown.end, shown.found
    if output is Output.text:
        preempted = shown.preempted.text() if shown.preempted else ""
        images = ", ".join(shown.images)
        ended = (shown.run, shown.folder, end.succeeded, end.seconds, found)
        print("\n".join(lines(*ended, preempted, images, restarts=shown.restarts, report=shown.report)))
        if end.succeeded:
            commands = [*next_commands(job.typed, shown.folder, has_metrics=found is not None)]
            if commands:
                print("\n".join(["", "next", *(f"  {command}\n      {why}" for command, why in commands)]))
        return
    data = {
        "run": shown.run,
        "state": "SUCCEEDED" if end.succeeded else "FAILED",
        "exit_codes": end.exit_codes,
        "seconds": end.seconds,
        "run_folder": shown.folder,
        "report": shown.report or None,
        **as_data(found, end.time),
        "restarts": shown.restarts,
        "error": None,
    }
    if shown.images:
        data["images"] = list(shown.images)
    if shown.left:
        data["left_behind"] = [
            {
                "folder": left.folder and str(left.folder),
                "files": left.files,
                **({"problem": left.problem} if left.problem else {}),
            }
            for left in shown.left
        ]
    if shown.preempted:
        data["preemption"] = shown.preempted.as_data()
    printed(data, output, error)
