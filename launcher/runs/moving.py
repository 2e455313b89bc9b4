"""Move a run to another place: copy its folder, and close the one that it leaves.

The old folder is closed before anything is copied, so that no start continues there; a repeated move continues. What a
start looks for first is copied last, so that half a copy is never taken for the run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from launch_train import runfolder
from launch_train.common.storage.local import ForeignFileError
from launch_train.runfolder import INCOMPLETE
from launcher.errors import LaunchError, UsageError
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.cancelling import block_next
from launcher.runs.ledger import json_field
from launcher.text import size_text

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.runs.find import FoundRun

LAST: Final = (runfolder.LATEST, runfolder.PLAN)
"""Copied after everything else: without them the copy is no run."""
REPORT_SECONDS: Final = 5.0
FILE_SECONDS: Final = 3600.0
"""For one file: a part of a checkpoint may have gigabytes."""


def move_run(run: FoundRun, to: str, say: Callable[[str], None]) -> str:
    """Move an ended run below the folder `to` (gs://…, ssh://HOST/…, or one on this machine), and return its new
    folder.

    Raises UsageError: the run is active, has no folder, has moved elsewhere, or `to` has another run of that ID;
    LaunchError: a file was not copied whole. The same call continues.
    """
    if run.is_active:
        raise UsageError(f"{run.id} is still running", f"launch cancel {run.id}")
    if not run.folder:
        raise UsageError(f"{run.id} has no run folder", "Set output in the spec.")
    source, target = open_folder(run.folder), open_folder(f"{to.rstrip('/')}/{run.id}")
    if source.url == target.url:
        raise UsageError(f"{run.id} is already in {source.url}", "Name another place.")
    source, target = source.within(FILE_SECONDS), target.within(FILE_SECONDS)
    with use_errors():
        if json_field(content_of(source, runfolder.MOVED), "to") == target.url and not content_of(target, INCOMPLETE):
            return target.url  # it has moved already, and may have continued
        check_place(run.id, target, source.url)
        close_folder(source, target.url)
        block_next(run, say)
        copy_files(source, target, say)
        target.delete(runfolder.MOVED)  # the run may have been here before
        target.delete(INCOMPLETE)
    return target.url


def content_of(storage: Storage, name: str) -> bytes:
    """Return a file's content; empty if it does not exist."""
    try:
        return storage.read(name)
    except FileNotFoundError:
        return b""


def check_place(run: str, target: Storage, source: str) -> None:
    """Check that a folder is empty, or that the run has left it, or is being moved there. Raises UsageError."""
    names = target.list()
    if not names or runfolder.MOVED in names or INCOMPLETE in names:
        target.write(INCOMPLETE, source.encode())
        return
    fix = f"Delete it (launch rm {target.url}), or name another place."
    raise UsageError(f"{target.url} has another run {run}", fix)


def close_folder(source: Storage, to: str) -> None:
    """Mark a run folder as left for another one. Raises UsageError: it was left for yet another."""
    content = json.dumps({"to": to, "time": time.time()}).encode()
    try:
        source.write(runfolder.MOVED, content, create=True)
    except FileExistsError:
        if (before := json_field(source.read(runfolder.MOVED), "to")) != to:
            raise UsageError(
                f"the run was moved to {before}", f"launch move {before} {to.rpartition('/')[0]}"
            ) from None


def copy_files(source: Storage, target: Storage, say: Callable[[str], None]) -> None:
    """Copy all files that the target lacks. Raises LaunchError: one was not copied whole."""
    left_out = {runfolder.MOVED, runfolder.NOW, INCOMPLETE}
    names = sorted({*source.list()} - left_out, key=lambda name: (name in LAST, name))
    there, copied, reported = {*target.list()}, 0, time.monotonic()
    for number, name in enumerate(names, start=1):
        try:
            data, version = source.read_version(name)
        except ForeignFileError:
            say(f"{name} was left out: it is a link, a pipe or a device")
            continue
        if name in there and target.read(name) == data:
            continue
        digest = hashlib.sha256(data).hexdigest()
        for known in (version, target.write(name, data)):  # a bucket's versions are no digests: its client checks them
            if len(known) == len(digest) and known != digest:
                raise LaunchError(f"{name} was damaged on its way", "Repeat the command.")
        copied += len(data)
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            say(f"{number} of {len(names)} files, {size_text(copied)}")
    for name in sorted({*target.list()} - {*names} - left_out):
        target.delete(name)  # of an earlier stay
