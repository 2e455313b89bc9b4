"""Find a sweep by its name: on this machine, and in the cloud."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from launcher.cli.flows.cloud import here, say_not_searched
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.jobs.job import RUN_ID
from launcher.runs.find import exact_run, searched
from launcher.runs.sweep.find import FoundSweep, Sweep, find_sweep, local_points
from launcher.spec.sweep import NAME

SWEEP_ID: Final = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{6}")
"""A name that launch has chosen. Any other name is first taken for a run's."""


def find_named(text: str, regions: Sequence[str] | None) -> Sweep | None:
    """Return the sweep of that name; None: there is none. One on this machine does not hide billed jobs. With `regions`
    only the cloud is searched."""
    points = None if regions else local_points(text)
    cloud = cloud_sweep(text, regions)
    return Sweep(name=text, here=points, cloud=cloud) if points or cloud else None


def may_be_sweep(text: str) -> bool:
    """Return whether `text` may be a sweep's name: it is not an ID, a path, or the name of a folder in ./runs."""
    if not NAME.fullmatch(text) or re.fullmatch(RUN_ID, text):
        return False
    with suppress(UsageError):
        return exact_run(text) is None
    return False


def cloud_sweep(text: str, regions: Sequence[str] | None) -> FoundSweep | None:
    """Return the sweep in the cloud of that name; None: there is none, or the cloud cannot be searched."""
    try:
        return find_sweep(here(), text, searched(regions))
    except (UsageError, NotAuthorised):
        return None
    except LaunchError as error:
        say_not_searched(error)
        return None
