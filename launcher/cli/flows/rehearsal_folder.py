"""The folder of a rehearsed run: who has it, what was there before, and what is noted in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch_train.common import contract
from launcher.cli.flows.preemption import say
from launcher.errors import LaunchError, NotAuthorised, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launch_train.common.storage import Storage
    from launcher.plan.model import Plan
    from launcher.rehearsal.attempts import End
    from launcher.rehearsal.request import Job
    from launcher.runs.metrics.results import Results

READERS = 8
"""Parts of the metrics that are read at once."""


@contextmanager
def opened(folder: str | None) -> Iterator[Storage | None]:
    """The run folder, ours alone as far as this machine goes; None when the request names none.

    In a bucket, where several machines may write, the trainer itself sees to it that one start of the run goes on.

    Raises:
        UsageError: it can't be used, or another `launch local` of this run is under way.
        NotAuthorised: there are no credentials for its bucket.
    """
    from launcher.gcp.storage import open_folder
    from launcher.rehearsal.folder_lock import lock_run_folder

    with ExitStack() as stack:
        try:
            storage = open_folder(folder) if folder else None
        except NotAuthorised as error:
            raise NotAuthorised(error.problem, "Or write into a folder here: --output runs") from error
        if (
            storage
            and not storage.url.startswith("gs://")
            and not stack.enter_context(lock_run_folder(Path(storage.url)))
        ):
            raise UsageError(
                f"another launch local of this run is under way on this machine, in {storage.url}",
                "Wait for its end, or stop it there (Ctrl-C). --new starts the job beside it, as a run of its own.",
            )
        if storage:
            check_format(storage)
        yield storage


def check_format(storage: Storage) -> None:
    """Raise UsageError if a newer launch wrote the run folder."""
    from launcher.gcp.storage import use_errors
    from launcher.plan.binding import read

    with use_errors(), suppress(FileNotFoundError):
        read(storage.read(contract.PLAN))


def ended_well(storage: Storage, fingerprint: str) -> End | None:
    """How the run ended, if nothing is left to do: its newest attempt did this very job, and ended with 0."""
    from launcher.gcp.storage import use_errors
    from launcher.rehearsal.attempts import newest_attempt, read_end, read_facts

    with use_errors():
        number = newest_attempt(storage)
        end = read_end(storage, number) if number else None
        same = end is not None and read_facts(storage, number).get("job") == fingerprint
    return end if end and end.succeeded and same else None


def say_ended(end: End, *, has_plan: bool) -> None:
    """That nothing is started, and how it would be."""
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(end.time))
    say(f"this run had ended on {when} UTC; nothing was started")
    anew = "--new starts it anew, under the next number" if has_plan else "--output DIR runs it anew, somewhere else"
    say(anew)


def prepare(storage: Storage, plan: Plan | None, body: Mapping[str, Any], request: Job, fingerprint: str) -> int:
    """The attempt's lock, with the plan and spec beside it; the attempt's number is returned.

    Who types the command again wants it tried again, so a `terminal` of an earlier attempt is told and removed.
    """
    from launcher.gcp.storage import use_errors
    from launcher.rehearsal.attempts import lock

    with use_errors():
        with suppress(FileNotFoundError):
            reason = storage.read(contract.TERMINAL).decode(errors="replace").strip()
            say(f"the attempt before ended for good: {reason}")
            storage.delete(contract.TERMINAL)
        attempt = lock(storage, {**attempt_facts(plan, body), "job": fingerprint})
        if attempt > 1:
            say(f"attempt {attempt} of this run; {goes_on(storage, request)}")
        if plan:
            from launcher.cli.ui.plan_page import as_yaml

            storage.write(contract.PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=2))
            storage.write(contract.SPEC, f"{as_yaml(plan.spec)}\n".encode())
    return attempt


def goes_on(storage: Storage, request: Job) -> str:
    """Where the next attempt begins, as far as we know: a script of the user's may have ways of its own."""
    from launcher.rehearsal.attempts import newest_checkpoint

    if not request.is_builtin:
        return "it writes to the same run folder"
    step = newest_checkpoint(storage)
    if step is None:
        return "it has no checkpoint yet: from step 1"
    return f"it goes on from its newest checkpoint (step {step})"


def attempt_facts(plan: Plan | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the lock says about the attempt."""
    planned = plan.attempts[0] if plan else None
    return {
        "spec": body.get("labels", {}).get("launch-spec"),
        "region": "local",
        "zone": None,
        "machine": planned.machine_type if planned else None,
        "provisioning": planned.provisioning if planned else None,
    }


def note(storage: Storage, attempt: int, end: End) -> None:
    """Write how the attempt ended. Where that fails, it is told: the job's own end matters more."""
    from launcher.gcp.storage import use_errors
    from launcher.rehearsal.attempts import write_end

    try:
        with use_errors():
            write_end(storage, attempt, end)
    except LaunchError as error:
        say(f"how the attempt ended can't be noted: {error.problem}")


def read_results(storage: Storage | None) -> Results | None:
    """The run's metrics, or None when it wrote none."""
    if storage is None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    from launcher.gcp.storage import use_errors
    from launcher.runs.metrics.results import results

    with use_errors():
        names = storage.list(f"{contract.METRICS}/")
        with ThreadPoolExecutor(READERS) as threads:
            return results(dict(zip(names, threads.map(storage.read, names), strict=True))) if names else None


def restarts(storage: Storage) -> int:
    """How often the run's processes were started again."""
    from launcher.gcp.storage import use_errors
    from launcher.rehearsal.attempts import count_restarts as counted

    with use_errors():
        return counted(storage)


def new_run(run: str, folder: str) -> str:
    """The first of RUN, RUN-2, RUN-3 … whose folder, beside the run's own `folder`, has no attempts."""
    from launcher.gcp.storage import open_folder, use_errors
    from launcher.rehearsal.attempts import newest_attempt

    beside = folder.rpartition("/")[0]
    with use_errors():
        ids = (run if number == 1 else f"{run}-{number}" for number in count(1))
        return next(one for one in ids if not newest_attempt(open_folder(f"{beside}/{one}")))
