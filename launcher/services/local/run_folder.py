"""The run folder of `launch local`: lock it, read earlier attempts, record attempts and their ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from launch_train import runfolder
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.gcp.storage import open_folder, use_errors
from launcher.plan.binding import read
from launcher.plan.yaml_text import as_yaml
from launcher.services.local.attempts import (
    End,
    lock,
    newest_attempt,
    newest_checkpoint,
    read_end,
    read_facts,
    write_end,
)
from launcher.services.local.folder_lock import lock_run_folder

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.plan.model import Plan
    from launcher.services.local.request import ParsedJob
    from launcher.services.local.supervisor import Say


@contextmanager
def opened(folder: str | None) -> Iterator[Storage | None]:
    """Open the run folder and lock it against other processes of this machine; None if the request has none.

    A folder in a bucket is not locked: there the trainer's checkpoint lease lets one start continue.

    Raises:
        UsageError: the folder is unusable, or another `launch local` of this run is running.
        NotAuthorised: there are no credentials for its bucket.
    """
    with ExitStack() as stack:
        try:
            storage = open_folder(folder) if folder else None
        except NotAuthorised as error:
            raise NotAuthorised(error.problem, f"{error.hint}\nOr write to a local folder: --output runs") from error
        if (
            storage
            and not storage.url.startswith("gs://")
            and not stack.enter_context(lock_run_folder(Path(storage.url)))
        ):
            raise UsageError(
                f"this run is already running on this machine, in {storage.url}",
                "Wait for it or stop it (Ctrl-C), or start a separate run with --new.",
            )
        if storage:
            with use_errors():
                closed = runfolder.closed_text(storage, storage.list(f"{runfolder.ATTEMPTS}/"))
            if closed:
                raise UsageError(closed, "To start a separate run here: --new")
            with use_errors(), suppress(FileNotFoundError):
                read(storage.read(runfolder.PLAN))  # raises UsageError: a newer launch wrote the run folder
        yield storage


def ended_well(storage: Storage, fingerprint: str) -> End | None:
    """Return the end of the newest attempt if it ran this same job and succeeded, else None."""

    with use_errors():
        number = newest_attempt(storage)
        end = read_end(storage, number) if number else None
        same = end is not None and read_facts(storage, number).get("job") == fingerprint
    return end if end and end.succeeded and same else None


def prepare(
    storage: Storage,
    plan: Plan | None,
    body: Mapping[str, Any],
    request: ParsedJob,
    fingerprint: str,
    say: Say,
    python: str = "",
) -> int:
    """Write the attempt's lock, the plan and the spec; return the attempt's number. `python` is kept for the next one.

    Repeating the command asks for a retry, so a `terminal` file of an earlier attempt is reported and removed.
    """

    with use_errors():
        with suppress(FileNotFoundError):
            reason = storage.read(runfolder.TERMINAL).decode(errors="replace").strip()
            say(f"the previous attempt failed permanently: {reason}")
            storage.delete(runfolder.TERMINAL)
        attempt = lock(storage, {**attempt_facts(plan, body), "job": fingerprint, "python": python})
        if attempt > 1:
            say(f"attempt {attempt} of this run; {start_text(storage, is_builtin=request.is_builtin)}")
        if plan:
            storage.write(runfolder.PLAN, msgspec.json.format(msgspec.json.encode(plan), indent=2))
            storage.write(runfolder.SPEC, f"{as_yaml(plan.spec)}\n".encode())
    return attempt


def start_text(storage: Storage, *, is_builtin: bool) -> str:
    """Return where the next attempt starts; a script without checkpoints of launch decides that itself."""
    with use_errors():
        step = newest_checkpoint(storage)
    if step is not None:
        return f"it resumes from its newest checkpoint (step {step})"
    return (
        "it has no checkpoint yet and starts at step 1" if is_builtin else "its script starts again in the same folder"
    )


def attempt_facts(plan: Plan | None, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that the lock records about the attempt."""
    planned = plan.attempts[0] if plan else None
    return {
        "spec": body.get("labels", {}).get("launch-spec"),
        "region": "local",
        "zone": None,
        "machine": planned.machine_type if planned else None,
        "provisioning": planned.provisioning if planned else None,
        "labels": body.get("labels", {}),
    }


def record_end(storage: Storage, attempt: int, end: End, say: Say) -> None:
    """Record how the attempt ended. A failure to do so is only printed: the job's own result matters more."""

    try:
        with use_errors():
            write_end(storage, attempt, end)
    except LaunchError as error:
        say(f"cannot record how the attempt ended: {error.problem}")


def new_run(run: str, folder: str) -> str:
    """Return the first of RUN, RUN-2, RUN-3 … without attempts; their folders are siblings of `folder`."""

    beside = folder.rpartition("/")[0]
    with use_errors():
        ids = (run if number == 1 else f"{run}-{number}" for number in count(1))
        return next(candidate for candidate in ids if not newest_attempt(open_folder(f"{beside}/{candidate}")))
