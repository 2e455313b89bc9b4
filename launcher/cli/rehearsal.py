"""A rehearsal from the request to the page at its end."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.cli.options import Output
from launcher.errors import JobFailed, UsageError
from train import contract

if TYPE_CHECKING:
    from launcher.apply.requests import Job
    from launcher.plan.model import Plan
    from launcher.results import Results
    from train.storage import Storage


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: a request, the folder with the user's code, and the plan it came from, if it did."""

    request: dict[str, Any]
    code: Path | None
    plan: Plan | None = None
    typed: tuple[str, ...] = ()
    """The spec and the flags of the command line, to type them again; a request from a file has none."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: an exit code for each replica (negative: the signal that ended it)."""

    exit_codes: dict[str, int]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether there was a replica, and every one exited 0."""
        return bool(self.exit_codes) and not any(self.exit_codes.values())


def run(job: Rehearsal, output: Output) -> None:
    """Run it to its end and show how it went.

    Raises:
        UsageError: the request can't be rehearsed here, or its run folder can't be written.
        JobFailed: a replica ended with something else than 0.
    """
    from launcher.apply.requests import parsed

    gc.enable()  # from here on this process lives as long as the job
    request = parsed(job.request)
    refuse_secrets(request)
    folder = request.run_folder
    with told():
        storage = opened(folder)
        if storage:
            prepare(storage, job)
    say_what_is_left_out(job)
    printer = LinePrinter()
    outcome = rehearse(request, job.code, printer)
    with told():
        found = read_results(storage)
    show(request.name, job, folder, outcome, found, output)
    if not outcome.succeeded:
        raise failure(outcome, folder, printer.error)


def refuse_secrets(request: Job) -> None:
    """Secrets are read on the node, which this version doesn't do yet."""
    if contract.SECRETS in request.variables:
        raise UsageError(
            "the spec has secrets, which this version doesn't read on the node yet",
            "Leave `secrets` out of the spec that you rehearse.",
        )


@contextmanager
def told() -> Iterator[None]:
    """A run folder that can't be used, as launch's own error."""
    from train.storage import OutputError

    try:
        yield
    except OutputError as error:
        raise UsageError(f"the run folder can't be used: {error}", "Write somewhere else: --output DIR") from error


def opened(folder: str | None) -> Storage | None:
    """The run folder; None when the request names none. A bucket needs an endpoint or credentials.

    Raises:
        OutputError: gs:// and neither.
    """
    from train.storage import open_storage

    return open_storage(folder) if folder else None


def prepare(storage: Storage, job: Rehearsal) -> None:
    """The attempt's lock, and the plan and spec beside it.

    Who types the command again wants it tried again, so a `terminal` of an earlier attempt is told and removed.
    """
    from launcher.apply.attempts import lock

    with suppress(FileNotFoundError):
        reason = storage.read(contract.TERMINAL).decode(errors="replace").strip()
        print(f"launch: the attempt before ended for good: {reason}", file=sys.stderr)
        storage.delete(contract.TERMINAL)
    attempt = lock(storage, attempt_facts(job))
    if attempt > 1:
        print(f"launch: attempt {attempt} of this run; it begins at step 1, in the same folder", file=sys.stderr)
    if job.plan:
        from launcher.cli.show import as_yaml

        storage.write(contract.PLAN, msgspec.json.format(msgspec.json.encode(job.plan), indent=2))
        storage.write(contract.SPEC, f"{as_yaml(job.plan.spec)}\n".encode())


def attempt_facts(job: Rehearsal) -> dict[str, Any]:
    """What the lock says about the attempt."""
    planned = job.plan.attempts[0] if job.plan else None
    return {
        "spec": job.request.get("labels", {}).get("launch-spec"),
        "region": "local",
        "zone": None,
        "machine": planned.machine_type if planned else None,
        "provisioning": planned.provisioning if planned else None,
    }


def say_what_is_left_out(job: Rehearsal) -> None:
    """A rehearsal without an image has this Python's packages and this machine's files."""
    from launcher.cli.show import REHEARSED

    print(f"launch: no image; {REHEARSED.partition(': ')[2]}", file=sys.stderr)
    image = job.plan.spec.get("image", {}) if job.plan else {}
    if image.get("requirements"):
        print(f"launch: {image['requirements']} isn't installed here; what this Python has is used", file=sys.stderr)
    if image.get("uri"):
        print("launch: the code in your own image isn't here; the job runs in an empty folder", file=sys.stderr)


def rehearse(request: Job, code: Path | None, on_line: LinePrinter) -> Outcome:
    """Run the replicas, their lines on stderr; after Ctrl-C say what is left."""
    from launcher.apply.local import rehearse as run_request

    begun = time.monotonic()
    try:
        codes = run_request(request, code=code, job_id=str(time.time_ns()), environ=os.environ, on_line=on_line)
    except KeyboardInterrupt:
        where = f"The run folder is {request.run_folder}." if request.run_folder else "There is no run folder."
        print(f"launch: interrupted; everything was stopped. {where}", file=sys.stderr)
        raise
    return Outcome(exit_codes=codes, seconds=time.monotonic() - begun)


ERROR = re.compile(r"(\[rank\d+\]: )?(?P<error>[A-Za-z_][\w.]*(Error|Exception)(:.*)?)$")
"""The last line of a Python traceback; torch writes the rank in front once the processes have joined."""


class LinePrinter:
    """Prints whole lines of all replicas on stderr, each with its replica's name in front.

    `error` is the first line since the newest start that ends a Python traceback: with several processes the cause
    stands above the complaints of those that waited for the one that failed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error = ""

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"[{replica}] {line}", file=sys.stderr, flush=True)
            if line.startswith("train.node: ") and "; starting again (" in line:
                self.error = ""
            elif not self.error and (found := ERROR.match(line)):
                self.error = f"[{replica}] {found['error']}"


def read_results(storage: Storage | None) -> Results | None:
    """The run's metrics, or None when it wrote none."""
    if storage is None:
        return None
    from launcher.results import results

    names = storage.list(f"{contract.METRICS}/")
    return results({name: storage.read(name) for name in names}) if names else None


def failure(outcome: Outcome, folder: str | None, error: str) -> JobFailed:
    """Which replica failed, and with what."""
    name, code = next((name, code) for name, code in outcome.exit_codes.items() if code)
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    first = f"The first error: {error}\n" if error else ""
    return JobFailed(f"the job failed: {name} {how}", f"{first}Its output stands above; the run folder is {folder}.")


def meaning(code: int) -> str:
    """What one of the contract's codes says, in words."""
    words = {
        contract.Exit.USAGE: "its config or code can't work",
        contract.Exit.UNFIT: "this machine is not fit for it",
        contract.Exit.PREEMPTED: "preempted",
        contract.Exit.DISAGREED: "the ranks' parameters differ",
        contract.Exit.TERMINAL: "the run folder says that it must not start again",
    }
    return next((f" ({text})" for known, text in words.items() if known == code), "")


def show(
    name: str, job: Rehearsal, folder: str | None, outcome: Outcome, found: Results | None, output: Output
) -> None:
    """The result on stdout."""
    from launcher.cli.summary import as_data, lines, next_commands

    run = name or "the job"
    if output is Output.text:
        print("\n".join(lines(run, folder, outcome.succeeded, outcome.seconds, found)))
        if outcome.succeeded:
            nodes = job.plan.machine.nodes if job.plan else None
            print("\n".join(["", *next_commands(folder, job.typed, nodes, found)]))
        return
    data = {"run": run, "exit_codes": outcome.exit_codes, "run_folder": folder, **as_data(found)}
    if output is Output.json:
        print(json.dumps(data, indent=2))
    else:
        from launcher.cli.show import as_yaml

        print(as_yaml(data))
