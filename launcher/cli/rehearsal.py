"""A rehearsal from the request to the page at its end."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.cli import preemption, runfolder
from launcher.cli.options import Output
from launcher.cli.preemption import Preempted, Ran
from launcher.cli.printer import LinePrinter
from launcher.errors import JobFailed, UsageError
from train import contract

if TYPE_CHECKING:
    from launcher.apply import processes
    from launcher.apply.attempts import End
    from launcher.apply.requests import Job
    from launcher.plan.model import Plan
    from launcher.results import Results
    from train.storage import Storage


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: a request, the folder with the user's code, and the plan it came from, if it did."""

    request: dict[str, Any]
    code: Path | None
    content: str = ""
    """The digest of the code."""
    plan: Plan | None = None
    typed: tuple[str, ...] = ()
    """The spec and the flags of the command line, to type them again; a request from a file has none."""
    preempt_after: float | None = None
    """Seconds from the replicas' start to a preemption."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown at the end. `end` may be that of an earlier command."""

    run: str
    folder: str | None
    end: End
    found: Results | None
    preempted: Preempted | None = None


def run(job: Rehearsal, output: Output) -> None:
    """Run it to its end and show how it went; a run that has ended well already is only shown.

    Raises:
        UsageError: the request can't be rehearsed here, or its run folder can't be used, or is in use.
        JobFailed: a replica ended with something else than 0.
    """
    from launcher.apply.requests import fingerprint, parsed

    gc.enable()  # from here on this process lives as long as the job
    request = parsed(job.request)
    refuse_secrets(request)
    what = fingerprint(request, job.content)
    with runfolder.opened(request.run_folder) as storage:
        before = runfolder.ended_well(storage, what) if storage else None
        if before:
            runfolder.say_ended(before, job)
            show(page(request, before, storage), job, output)
        else:
            attempt = runfolder.prepare(storage, job, request, what) if storage else 0
            run_attempt(job, request, storage, attempt, output)


def run_attempt(job: Rehearsal, request: Job, storage: Storage | None, attempt: int, output: Output) -> None:
    """Run one attempt (0 without a run folder), note how it ended, and show it. Raises JobFailed."""
    from launcher.apply.attempts import End

    say_what_is_left_out(job)
    printer, begun = LinePrinter(), time.monotonic()
    ran = rehearse(job, request, printer)
    end = End(exit_codes=ran.exit_codes, seconds=time.monotonic() - begun, time=time.time())
    if storage:
        runfolder.note(storage, attempt, end)
    shown = page(request, end, storage)
    if ran.preempted is not None and job.preempt_after is not None:
        shown = msgspec.structs.replace(shown, preempted=told(job.preempt_after, ran.preempted, shown.found, attempt))
    show(shown, job, output)
    if not end.succeeded:
        raise failure(end, request.run_folder, printer.error)


def refuse_secrets(request: Job) -> None:
    """Secrets are read on the node, which this version doesn't do yet."""
    if contract.SECRETS in request.variables:
        raise UsageError(
            "the spec has secrets, which this version doesn't read on the node yet",
            "Leave `secrets` out of the spec that you rehearse.",
        )


def say_what_is_left_out(job: Rehearsal) -> None:
    """A rehearsal without an image has this Python's packages and this machine's files."""
    from launcher.cli.show import REHEARSED

    print(f"launch: no image; {REHEARSED.partition(': ')[2]}", file=sys.stderr)
    image = job.plan.spec.get("image", {}) if job.plan else {}
    if image.get("requirements"):
        print(f"launch: {image['requirements']} isn't installed here; what this Python has is used", file=sys.stderr)
    if image.get("uri"):
        print("launch: the code in your own image isn't here; the job runs in an empty folder", file=sys.stderr)


def rehearse(job: Rehearsal, request: Job, printer: LinePrinter) -> Ran:
    """Run the replicas, their lines on stderr; after Ctrl-C say what is left."""
    from launcher.apply.local import rehearse as start_job

    job_id = str(time.time_ns())

    def start(preempted: processes.Preemption | None) -> processes.Ended:
        printer.error = ""
        return start_job(
            request, code=job.code, job_id=job_id, environ=os.environ, on_line=printer, preemption=preempted
        )

    try:
        return preemption.run(start, job.preempt_after)
    except KeyboardInterrupt:
        where = f"The run folder is {request.run_folder}." if request.run_folder else "There is no run folder."
        print(f"launch: interrupted; everything was stopped. {where}", file=sys.stderr)
        raise


def page(request: Job, end: End, storage: Storage | None) -> Page:
    """What there is to show of a run."""
    return Page(
        run=request.name or "the job", folder=request.run_folder, end=end, found=runfolder.read_results(storage)
    )


def told(after: float, exit_codes: dict[str, int], found: Results | None, attempt: int) -> Preempted:
    """What the metrics say about the preemption of an attempt."""
    from launcher.results import Results

    return Preempted(after=after, exit_codes=exit_codes, went_on=(found or Results(starts=())).resumption(attempt))


def failure(end: End, folder: str | None, error: str) -> JobFailed:
    """Which replica failed, and with what."""
    name, code = next((name, code) for name, code in end.exit_codes.items() if code)
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    first = f"The first error: {error}\n" if error else ""
    hint = f"{first}Its output stands above; the run folder is {folder}."
    if code == contract.Exit.PREEMPTED:
        return JobFailed(f"the job was stopped: {name} {how}", f"The same command goes on from there.\n{hint}")
    return JobFailed(f"the job failed: {name} {how}", hint)


def meaning(code: int) -> str:
    """What one of the contract's codes says, in words."""
    words = {
        contract.Exit.USAGE: "its config or code can't work",
        contract.Exit.UNFIT: "this machine is not fit for it",
        contract.Exit.PREEMPTED: "preempted: stopped from outside, after saving",
        contract.Exit.DISAGREED: "the ranks' parameters differ",
        contract.Exit.SUPERSEDED: "another start of this run has taken over",
        contract.Exit.TERMINAL: "the run folder says that it must not start again",
    }
    return next((f" ({text})" for known, text in words.items() if known == code), "")


def show(shown: Page, job: Rehearsal, output: Output) -> None:
    """The result on stdout."""
    from launcher.cli.summary import as_data, lines, next_commands

    end, found = shown.end, shown.found
    if output is Output.text:
        preempted = shown.preempted.text() if shown.preempted else ""
        print("\n".join(lines(shown.run, shown.folder, end.succeeded, end.seconds, found, preempted)))
        if end.succeeded:
            nodes = job.plan.machine.nodes if job.plan else None
            print("\n".join(["", *next_commands(shown.folder, job.typed, nodes, found)]))
        return
    data = {"run": shown.run, "exit_codes": end.exit_codes, "run_folder": shown.folder, **as_data(found)}
    if shown.preempted:
        data["preemption"] = shown.preempted.as_data()
    if output is Output.json:
        print(json.dumps(data, indent=2))
    else:
        from launcher.cli.show import as_yaml

        print(as_yaml(data))
