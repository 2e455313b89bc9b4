"""A rehearsal from the request to the page at its end."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.cli.options import Flags, Output
from launcher.errors import JobFailed, UsageError
from train import contract

if TYPE_CHECKING:
    from launcher.plan.model import Plan
    from launcher.results import Results
    from train.storage import Storage


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """What is run: a request, the folder with the user's code, and the plan it came from, if it came from one."""

    request: dict[str, Any]
    code: Path | None
    plan: Plan | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How it ended: an exit code for each replica (negative: the signal that ended it)."""

    exit_codes: dict[str, int]
    seconds: float

    @property
    def succeeded(self) -> bool:
        """Whether every replica exited 0."""
        return not any(self.exit_codes.values())


def of_plan(plan: Plan, code: Path | None) -> Rehearsal:
    """The plan's one attempt."""
    return Rehearsal(request=plan.attempts[0].request, code=code, plan=plan)


def of_request(path: Path, code: Path | None, flags: Flags) -> Rehearsal:
    """A request from a file, written by hand or saved from a dry run's JSON; `--output` moves its run folder.

    Raises:
        UsageError: the file isn't JSON of a CustomJob.
    """
    from launcher.apply.replicas import rebased, replica_counts

    try:
        request = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--request {path} can't be read as JSON: {error}") from error
    if not isinstance(request, dict):
        raise UsageError(f"--request {path} isn't a JSON object", "It must be a CustomJob: {displayName, jobSpec, …}.")
    replica_counts(request)
    if flags.output:
        request = rebased(request, str(Path(flags.output).expanduser().resolve()))
    return Rehearsal(request=request, code=code.resolve() if code else None)


def run(job: Rehearsal, output: Output) -> None:
    """Run it to its end and show how it went.

    Raises:
        UsageError: the request can't be rehearsed here.
        JobFailed: a replica ended with something else than 0.
    """
    from launcher.apply.replicas import run_folder

    gc.enable()  # from here on this process lives as long as the job
    folder = run_folder(job.request)
    refuse_secrets(job.request)
    storage = opened(folder)
    if storage:
        prepare(storage, job)
    outcome = rehearse(job)
    found = read_results(storage)
    show(job, folder, outcome, found, output)
    if not outcome.succeeded:
        raise failure(outcome, folder)


def refuse_secrets(request: Mapping[str, Any]) -> None:
    """Secrets are read on the node, which this version doesn't do yet."""
    pools = request["jobSpec"]["workerPoolSpecs"]
    names = {entry["name"] for pool in pools for entry in pool.get("containerSpec", {}).get("env", ())}
    if contract.SECRETS in names:
        raise UsageError(
            "the spec has secrets, which this version doesn't read on the node yet",
            "Leave `secrets` out of the spec that you rehearse.",
        )


def opened(folder: str | None) -> Storage | None:
    """The run folder. A bucket needs an endpoint or credentials.

    Raises:
        UsageError: gs:// and neither.
    """
    if folder is None:
        return None
    from train.storage import open_storage

    if folder.startswith("gs://") and not can_reach_buckets(os.environ):
        raise UsageError(
            f"the run writes to {folder}, and there are no Google credentials here",
            "Write to a folder instead: --output DIR. Or: gcloud auth application-default login",
        )
    return open_storage(folder)


def can_reach_buckets(environ: Mapping[str, str]) -> bool:
    """Whether there is an endpoint of a test server, or credentials that Google's libraries find."""
    if environ.get("STORAGE_EMULATOR_HOST"):
        return True
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
    except ImportError:
        return False
    try:
        google.auth.default()
    except DefaultCredentialsError:
        return False
    return True


def prepare(storage: Storage, job: Rehearsal) -> None:
    """The attempt's lock, and the plan and spec beside it.

    Who types the command again wants it tried again, so a `terminal` of an earlier attempt is told and removed.
    """
    from launcher.apply.attempts import lock

    with suppress(FileNotFoundError):
        reason = storage.read(contract.TERMINAL).decode(errors="replace").strip()
        print(f"launch: the attempt before ended for good: {reason}", file=sys.stderr)
        storage.delete(contract.TERMINAL)
    lock(storage, {"region": "local", "request": job.request.get("displayName", "")})
    if job.plan:
        import yaml

        storage.write(contract.PLAN, msgspec.json.format(msgspec.json.encode(job.plan), indent=2))
        storage.write(contract.SPEC, yaml.safe_dump(job.plan.spec, sort_keys=False).encode())


def rehearse(job: Rehearsal) -> Outcome:
    """Run the replicas, their lines on stderr."""
    from launcher.apply.local import rehearse as run_request
    from launcher.cli.show import REHEARSED

    print(f"launch: no image; {REHEARSED.partition(': ')[2]}", file=sys.stderr)
    begun = time.monotonic()
    codes = run_request(
        job.request,
        code=job.code,
        job_id=str(time.time_ns()),
        environ=os.environ,
        on_line=LinePrinter(),
    )
    return Outcome(exit_codes=codes, seconds=time.monotonic() - begun)


class LinePrinter:
    """Prints whole lines of all replicas on stderr, each with its replica's name in front."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, replica: str, line: str) -> None:
        with self._lock:
            print(f"[{replica}] {line}", file=sys.stderr, flush=True)


def read_results(storage: Storage | None) -> Results | None:
    """The run's metrics, or None when it wrote none."""
    if storage is None:
        return None
    from launcher.results import results

    names = storage.list(f"{contract.METRICS}/")
    return results({name: storage.read(name) for name in names}) if names else None


def failure(outcome: Outcome, folder: str | None) -> JobFailed:
    """Which replica failed, and with what."""
    name, code = next((name, code) for name, code in outcome.exit_codes.items() if code)
    how = f"was ended by signal {-code}" if code < 0 else f"exited with {code}{meaning(code)}"
    return JobFailed(f"the job failed: {name} {how}", f"Its output stands above; the run folder is {folder}.")


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


def show(job: Rehearsal, folder: str | None, outcome: Outcome, found: Results | None, output: Output) -> None:
    """The result on stdout."""
    from launcher.cli.summary import as_data, lines

    run_id = str(job.request.get("displayName", "the job"))
    if output is Output.text:
        print("\n".join(lines(run_id, folder, outcome.succeeded, outcome.seconds, found)))
        return
    data = {"run": run_id, "exit_codes": outcome.exit_codes, "run_folder": folder, **as_data(found)}
    if output is Output.json:
        print(json.dumps(data, indent=2))
    else:
        import yaml

        print(yaml.safe_dump(data, sort_keys=False), end="")
