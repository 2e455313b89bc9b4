"""A rehearsal from the request to the page at its end."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch_train.common import contract
from launch_train.common.faults import NEEDS_GPU
from launcher.cli.flows import preemption, rehearsal_folder
from launcher.cli.flows.preemption import Preempted, Ran, say
from launcher.cli.options import Output
from launcher.cli.ui.line_printer import Cause, LinePrinter
from launcher.cli.ui.run_summary import relative
from launcher.errors import JobFailed, LaunchError
from launcher.rehearsal.workdirs import Code

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.cli.flows.suggestions import Typed
    from launcher.plan.model import Plan
    from launcher.rehearsal.attempts import End
    from launcher.rehearsal.request import Job
    from launcher.rehearsal.supervisor import Ended, Preemption
    from launcher.rehearsal.workdirs import WrittenFiles
    from launcher.runs.metrics.results import Results


WORKDIRS = "workdirs"
"""In a run folder on this machine: what starts left in their working directories, numbered. No start reads it."""
MOST_NAMED = 3
"""Files that a line names."""


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: a request, the user's code, and the plan it came from, if it did."""

    request: dict[str, Any]
    code: Code = Code()
    content: str = ""
    """The digest of the code."""
    plan: Plan | None = None
    typed: Typed | None = None
    """The spec and the flags of the command line, to type them again; a request from a file has none."""
    preempt_after: float | None = None
    """Seconds from the replicas' start to a preemption."""
    docker: bool = False
    """In containers, instead of as processes: the user's code is the image's then."""
    image: str | None = None
    """The image that the containers are of; None: what the request says."""
    job_id: str | None = None
    """The job that is played: somebody else submitted it, and has its run folder and its locks. None: one of ours."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown at the end. `end` may be that of an earlier command."""

    run: str
    folder: str | None
    end: End
    found: Results | None
    images: tuple[str, ...] = ()
    """What was run in containers."""
    left: tuple[WrittenFiles, ...] = ()
    """What each start wrote into its working directories."""
    preempted: Preempted | None = None
    restarts: int = 0
    """How often the run's processes were started again after a failure or a preemption."""


def run(job: Rehearsal, output: Output) -> None:
    """Run it to its end and show how it went; a run that has ended well already is only shown.

    Raises:
        UsageError: the request can't be rehearsed here, or its run folder can't be used, or is in use.
        JobFailed: a replica ended with something else than 0.
    """
    from launcher.rehearsal.request import fingerprint, parse_request, with_image

    gc.enable()  # from here on this process lives as long as the job
    request = parse_request(with_image(job.request, job.image) if job.image else job.request)
    if job.job_id:
        run_attempt(job, request, None, 0, output)
        return
    what = fingerprint(request, content(job, request))
    with rehearsal_folder.opened(request.run_folder) as storage:
        before = rehearsal_folder.ended_well(storage, what) if storage else None
        if before:
            rehearsal_folder.say_ended(before, has_plan=job.plan is not None)
            show(page(job, request, before, storage), job, output)
        else:
            if job.docker:  # before anything is written: no attempt without an engine or an image
                from launcher.rehearsal.in_docker import ensure_images

                ensure_images(request, os.environ, say)
            attempt = rehearsal_folder.prepare(storage, job.plan, job.request, request, what) if storage else 0
            run_attempt(job, request, storage, attempt, output)


def content(job: Rehearsal, request: Job) -> str:
    """What stands for the code: its digest, or the images that alone have it."""
    return " ".join(request.images) if job.docker and not job.plan else job.content


def run_attempt(job: Rehearsal, request: Job, storage: Storage | None, attempt: int, output: Output) -> None:
    """Run one attempt (0 without a run folder), note how it ended, and show it. Raises JobFailed."""
    from launcher.rehearsal.attempts import End

    if job.docker:
        say_what_is_run(request)
    else:
        say_what_is_left_out(job)
    printer, begun = LinePrinter(), time.monotonic()
    left: list[WrittenFiles] = []
    ran = rehearse(job, request, printer, left.append)
    end = End(exit_codes=ran.exit_codes, seconds=time.monotonic() - begun, time=time.time())
    if storage:
        rehearsal_folder.note(storage, attempt, end)
    shown = page(job, request, end, storage, printer.restarts)
    shown = msgspec.structs.replace(shown, left=tuple(left))
    if ran.preempted is not None and job.preempt_after is not None:
        shown = msgspec.structs.replace(
            shown, preempted=preemption_result(job.preempt_after, ran.preempted, shown.found, attempt)
        )
    error = None if end.succeeded else failure(end, request.run_folder, printer.cause)
    show(shown, job, output, error)
    if error:
        raise error


def say_what_is_run(request: Job) -> None:
    """The image is rehearsed too."""
    for image in request.images:
        say(f"in containers of {image}; image, command, environment and topology are rehearsed")


def say_what_is_left_out(job: Rehearsal) -> None:
    """A rehearsal without an image has this Python's packages and this machine's files."""
    from launcher.cli.ui.plan_page import REHEARSED

    if job.code.in_place:
        say(f"in {job.code.in_place} itself, also with files that the image would not have")
    say(f"no image; {REHEARSED.partition(': ')[2]}")
    image = job.plan.spec.get("image", {}) if job.plan else {}
    if image.get("requirements"):
        say(f"{image['requirements']} isn't installed here; what this Python has is used")
    if image.get("uri"):
        say("the code in your own image isn't here; the job runs in an empty folder")


def rehearse(job: Rehearsal, request: Job, printer: LinePrinter, on_left: Callable[[WrittenFiles], None]) -> Ran:
    """Run the replicas, their lines on stderr; after Ctrl-C say what is left."""
    job_id = job.job_id or str(time.time_ns())

    def say_left(left: WrittenFiles) -> None:
        on_left(left)
        if not job.job_id:
            say(left_text(left))

    try:
        with starter(job, request, say_left) as start_job:

            def start(preempted: Preemption | None) -> Ended:
                printer.reset()
                return start_job(request, job_id=job_id, environ=os.environ, on_line=printer, preemption=preempted)

            return preemption.run(start, job.preempt_after, builtin=request.is_builtin)
    except KeyboardInterrupt as stop:
        where = f"The run folder is {request.run_folder}." if request.run_folder else "There is no run folder."
        stop.add_note(f"everything was stopped. {where}")
        print(f"launch: interrupted; everything was stopped. {where}", file=sys.stderr)
        raise


@contextmanager
def starter(job: Rehearsal, request: Job, on_left: Callable[[WrittenFiles], None]) -> Iterator[Callable[..., Ended]]:
    """Yield what starts the replicas: as containers, or as processes that have the user's code."""
    if job.docker:
        from launcher.rehearsal.in_docker import rehearse as in_containers

        yield partial(in_containers, say=say, on_left=on_left)
        return
    from launcher.rehearsal.on_host import rehearse as as_processes
    from launcher.rehearsal.workdirs import snapshot

    code = job.code._replace(keep=None if job.job_id else partial(folder_for_left, request.run_folder))
    with snapshot(code) if job.preempt_after and not code.in_place else nullcontext(code) as same:
        yield partial(as_processes, code=same, on_left=on_left)


def folder_for_left(run_folder: str | None) -> Path:
    """Make and return the folder for what a start left: in a run folder on this machine, else a temporary one."""
    from launcher.rehearsal.workdirs import make_numbered_folder

    if run_folder and not run_folder.startswith("gs://"):
        return make_numbered_folder(Path(run_folder) / WORKDIRS)
    return Path(tempfile.mkdtemp(prefix="launch-workdirs-"))


def left_text(left: WrittenFiles) -> str:
    """`left in the working directory, which a job loses: out/ckpt.pt (10 MB); moved to runs/a/workdirs/1`."""
    from launcher.text import size_text

    largest = sorted(left.files, key=lambda name: -left.files[name])[:MOST_NAMED]
    named = ", ".join(
        f"{os.fsencode(name).decode(errors='replace')} ({size_text(left.files[name])})" for name in largest
    )
    more = f" and {len(left.files) - MOST_NAMED} more" if len(left.files) > MOST_NAMED else ""
    where = f"moved to {relative(str(left.folder))}" if left.folder else "not kept"
    where += f", but not all: {left.problem}" if left.problem else ""
    return f"written to the working directory, which a job loses: {named}{more}; {where}"


def left_data(left: WrittenFiles) -> dict[str, Any]:
    """For scripts; `problem` only where some files could not be moved."""
    data = {"folder": left.folder and str(left.folder), "files": left.files}
    return {**data, "problem": left.problem} if left.problem else data


def page(job: Rehearsal, request: Job, end: End, storage: Storage | None, restarts: int = 0) -> Page:
    """What there is to show of a run; `restarts` are those of this command, where no run folder has counted."""
    return Page(
        run=request.name or "the job",
        folder=request.run_folder,
        end=end,
        found=rehearsal_folder.read_results(storage),
        images=request.images if job.docker else (),
        restarts=rehearsal_folder.restarts(storage) if storage else restarts,
    )


def preemption_result(after: float, exit_codes: dict[str, int], found: Results | None, attempt: int) -> Preempted:
    """What the metrics say about the preemption of an attempt."""
    from launcher.runs.metrics.results import Results

    return Preempted(after=after, exit_codes=exit_codes, went_on=(found or Results(starts=())).resumption(attempt))


def failure(end: End, folder: str | None, cause: Cause | None) -> JobFailed:
    """Why it failed, where its lines say so, and what the replica exited with."""
    failed = {name: code for name, code in end.exit_codes.items() if code}
    name = cause.replica if cause and cause.replica in failed else next(iter(failed))
    code = failed[name]
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    ended = "the job was stopped" if code == contract.Exit.PREEMPTED else "the job failed"
    hint = [f"{name} {how}"] if cause else []
    if cause and NEEDS_GPU in cause.text:
        hint += ["This machine has none: use the CPU where torch.cuda.is_available() is false,"]
        hint += ["or run the job on Google Cloud (launch vertex, launch vm)."]
    hint += ["The same command goes on from there."] if code == contract.Exit.PREEMPTED else []
    hint += [f"Its output stands above{f'; the run folder is {folder}' if folder else ''}."]
    return JobFailed(f"{ended}: {cause.text if cause else f'{name} {how}'}", "\n".join(hint))


def meaning(code: int) -> str:
    """What one of the contract's codes says, in words, or the signal that ended a container."""
    words = {
        contract.Exit.USAGE: "its config or code can't work",
        contract.Exit.UNFIT: "this machine is not fit for it",
        contract.Exit.PREEMPTED: "preempted: stopped from outside, after saving",
        contract.Exit.DISAGREED: "the ranks' parameters differ",
        contract.Exit.SUPERSEDED: "another start of this run has taken over",
        contract.Exit.TERMINAL: "the run folder says that it must not start again",
    }
    if code - 128 in {*signal.Signals}:  # as shells and container engines tell a signal
        return f" ({signal.Signals(code - 128).name})"
    return next((f" ({text})" for known, text in words.items() if known == code), "")


def show(shown: Page, job: Rehearsal, output: Output, error: LaunchError | None = None) -> None:
    """The result on stdout. `error` ends the command."""
    from launcher.cli.flows.suggestions import next_commands
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import as_data, lines

    end, found = shown.end, shown.found
    if output is Output.text:
        preempted = shown.preempted.text() if shown.preempted else ""
        images = ", ".join(shown.images)
        ended = (shown.run, shown.folder, end.succeeded, end.seconds, found)
        print("\n".join(lines(*ended, preempted, images, restarts=shown.restarts)))
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
        **as_data(found, end.time),
        "restarts": shown.restarts,
        "error": None,
    }
    if shown.images:
        data["images"] = list(shown.images)
    if shown.left:
        data["left_behind"] = [*map(left_data, shown.left)]
    if shown.preempted:
        data["preemption"] = shown.preempted.as_data()
    printed(data, output, error)
