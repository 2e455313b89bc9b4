"""Delete a run that has ended: its folder with the checkpoints, and the records of its jobs.

Checkpoints are the result of paid time. Nothing is deleted until it is certain that the folder is the run's own, and
that the run has no job that could still write to it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from msgspec import Struct

from launch_train import runfolder
from launch_train.common.storage import LocalFolder, Storage
from launcher.errors import LaunchError, UsageError
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.cancelling import block_next, release_ended
from launcher.runs.find import RUNS, FoundRun
from launcher.runs.ledger import Ledger, json_field
from launcher.runs.on_host import remember
from launcher.runs.sweep.find import Sweep
from launcher.runs.sweep.record import remove_record
from launcher.services.local.folder_lock import lock_run_folder

DELETERS: Final = 16
"""Objects deleted in parallel."""
DELETING: Final = ".tmp-rm-"
"""Prefix of a local run folder that is being deleted; lists of runs skip it."""


class Removable(Struct, frozen=True, kw_only=True):
    """The data of a run that would be deleted."""

    run: str
    folder: str
    """Empty: the run has no folder."""
    objects: tuple[str, ...] = ()
    """Object names in the order of deletion: those that identify the run come last."""

    @property
    def checkpoints(self) -> tuple[int, ...]:
        matches = filter(None, map(runfolder.MANIFEST.match, self.objects))
        return tuple(sorted({int(match["step"]) for match in matches}))

    @property
    def user_files(self) -> tuple[str, ...]:
        """Return the objects that launch did not write, such as a script's own files."""
        names = (name for name in self.objects if name.partition("/")[0] not in runfolder.OWN_NAMES)
        return tuple(name for name in names if not name.rpartition("/")[2].startswith("."))


def removable_folder(run: str, storage: Storage) -> Removable:
    """Return the content of a run folder. Raises UsageError: it belongs to another run, or contains other runs."""
    with use_errors():
        names = storage.list()
        try:
            plan = storage.read(runfolder.PLAN)
        except FileNotFoundError:
            plan = b""
    nested = [name for name in names if name.endswith(f"/{runfolder.PLAN}")]
    if nested:
        raise UsageError(f"{storage.url} contains another run: {nested[0]}", "Delete that run first.")
    has_attempts = any(runfolder.ATTEMPT_LOCK.match(name) for name in names)
    exists = names or isinstance(storage, LocalFolder)  # a folder here may be empty: others have a `metrics` too
    if exists and json_field(plan, "run") != run and not has_attempts:
        raise UsageError(f"{storage.url} is not the folder of {run}: it has neither its plan nor attempts")
    return Removable(run=run, folder=storage.url, objects=tuple(sorted(names, key=deletion_order)))


def deletion_order(name: str) -> tuple[int, str]:
    """Return an object's sort key. The plan comes last: while it exists, an interrupted deletion can be repeated."""
    first = name.partition("/")[0]
    return {runfolder.ATTEMPTS: 1, runfolder.PLAN: 2}.get(first, 0), name


# --- Sweeps ----------------------------------------------------------------------------------------------------------


def remove_sweep_records(sweep: Sweep) -> None:
    """Delete the record of a sweep whose runs are deleted, so that its name is free. Raises LaunchError."""
    with use_errors():
        if sweep.here:
            remove_record(LocalFolder(Path(RUNS)), sweep.name)
        if sweep.cloud and sweep.cloud.output:
            remove_record(open_folder(sweep.cloud.output), sweep.name)


# --- Runs ------------------------------------------------------------------------------------------------------------


def removable_run(run: FoundRun) -> Removable:
    """Return the data of a run that would be deleted.

    Raises UsageError: it has an active job, may have one, or its folder is not its own; LaunchError.
    """
    if run.is_active:
        raise still_running(run.id)
    if run.unread:
        where = ", ".join(run.unread)
        raise UsageError(f"{where} could not be read; {run.id} may have a job there", "Try again in a moment.")
    if not run.folder or not run.folder.endswith(f"/{run.id}"):
        return Removable(run=run.id, folder="")
    storage = open_folder(run.folder)
    entries = Ledger(storage, run.context.clock).entries()
    if any(entry.end is None and entry.job is None and entry.round for entry in entries[-1:]):
        raise UsageError(f"an attempt of {run.id} is being created", f"launch cancel {run.id}")
    return removable_folder(run.id, storage)


def remove_run(run: FoundRun, data: Removable, say: Callable[[str], None]) -> None:
    """Delete a run: block its next attempt, then delete its folder and the records of its jobs.

    Raises LaunchError: not everything was deleted; the same call deletes the rest.
    """
    if data.folder:
        storage = open_folder(data.folder)
        check_not_resumed(run, data, storage)
        block_next(run, say)
        check_not_resumed(run, data, storage)
        if isinstance(storage, LocalFolder):
            delete_local_folder(run.id, storage.folder)
        else:
            with use_errors():
                delete_objects(storage, data.objects)
                delete_objects(storage, sorted(storage.list(), key=deletion_order))  # the block, and what came late
    service = run.context.of_run(None)
    errors = release_ended(service, run.jobs)
    for job in run.jobs:
        service.forget(job)
    if (run.folder or "").startswith("ssh://"):
        remember(run.id, None)
    if errors:
        raise errors[0]


def still_running(run: str) -> UsageError:
    return UsageError(f"{run} is still running, so it is not deleted", f"launch cancel {run}")


def delete_local_folder(run: str, folder: Path) -> None:
    """Delete the folder of a run on this machine. It disappears at once from all lists.

    Raises UsageError: the run is running; LaunchError: the folder can't be deleted.
    """
    with lock_run_folder(folder) as ours:
        if not ours:
            raise still_running(run)
        hidden = folder.with_name(f"{DELETING}{run}")
        try:
            if hidden.exists():  # an interrupted deletion of an earlier run with this ID
                shutil.rmtree(hidden)
            folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise LaunchError(f"{error.filename} can't be deleted: {error.strerror}", f"rm -r {hidden}") from error


def check_not_resumed(run: FoundRun, data: Removable, storage: Storage) -> None:
    """Check that no launch has resumed the run since it was found, which would have added an attempt. Raises
    UsageError."""
    known, before = {job.name for job in run.jobs}, {*data.objects}
    for entry in Ledger(storage).entries():
        is_new = runfolder.attempt_lock(entry.number) not in before and entry.job not in known
        if entry.round and entry.end is None and is_new:
            raise still_running(run.id)


def delete_objects(storage: Storage, names: Sequence[str]) -> None:
    """Delete objects in three groups, by `deletion_order`. Raises OutputError."""
    for turn in range(3):
        with ThreadPoolExecutor(DELETERS) as threads:
            list(threads.map(storage.delete, [name for name in names if deletion_order(name)[0] == turn]))
