"""Expand a sweep's name into its runs, for `launch report` and `launch cancel`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from launcher.api.find_local_run import exact_run, listed
from launcher.api.find_run import RUN_ID, NoSuchRun, searched
from launcher.api.find_sweep import FoundSweep, find_sweep, local_points
from launcher.api.run_folder import open_run_folder
from launcher.cli.flows.cloud import here
from launcher.cli.flows.find_run import folder_of
from launcher.errors import LaunchError, NotAuthorised, UsageError

if TYPE_CHECKING:
    from launch_train.common.storage import Storage

SWEEP_ID: Final = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{6}")
"""A name that launch has chosen. Any other name is first taken for a run's."""


def folders_of(text: str, regions: Sequence[str] | None) -> Iterator[tuple[str, Storage]]:
    """Yield the ID and the folder of each run of a sweep, or those of the run that `text` means.

    Raises:
        UsageError: no such run or sweep, or the path is not a run folder.
        LaunchError: a run has no folder, or it is unreadable.
    """
    if is_run(text):
        yield folder_of(text, regions)
        return
    if not regions and (points := local_points(text)):
        yield from ((one.id, open_run_folder(one.id, str(one.folder))) for one in reversed(points))
        return
    found = cloud_sweep(text, regions) if SWEEP_ID.fullmatch(text) else None
    if found is None:
        try:
            yield folder_of(text, regions)
        except (NoSuchRun, UsageError):
            found = None if SWEEP_ID.fullmatch(text) else cloud_sweep(text, regions)
            if found is None:
                raise
    if found:
        yield from ((run, open_run_folder(run, folder)) for run, folder in found.folders.items())


def sweep_to_cancel(text: str, regions: Sequence[str] | None) -> FoundSweep | None:
    """Return the sweep in the cloud that `text` names; None: it is a run's name.

    Raises UsageError: the sweep is on this machine.
    """
    if is_run(text):
        return None
    found = cloud_sweep(text, regions)  # one on this machine must not hide billed jobs
    if found is None and not regions and (points := local_points(text)):
        raise UsageError(
            f"launch cancel does not stop sweeps on this machine: {text}",
            f"If it is running, press Ctrl-C in its terminal. Its runs:\n{listed(points)}",
        )
    return found


def is_run(text: str) -> bool:
    """Return whether `text` can only mean a run: it is an ID or a path, or the name of a folder in ./runs."""
    if "/" in text or RUN_ID.fullmatch(text):
        return True
    with suppress(UsageError):
        return exact_run(text) is not None
    return True


def cloud_sweep(text: str, regions: Sequence[str] | None) -> FoundSweep | None:
    """Return the sweep in the cloud of that name; None: there is none, or the cloud cannot be searched."""
    try:
        return find_sweep(here(), text, searched(regions))
    except (UsageError, NotAuthorised):
        return None
    except LaunchError as error:
        print(f"launch: the cloud was not searched for a sweep: {error.problem}", file=sys.stderr)
        return None
