"""Runs that are in the cloud, found by what a person types: a run's name or id, a job's number or resource name."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launcher.errors import LaunchError, UsageError
from launcher.jobs import RUN_LABEL, Job

if TYPE_CHECKING:
    from launcher.apply.vertex import Vertex

RESOURCE = re.compile(r"projects/[^/]+/locations/(?P<region>[a-z0-9-]+)/customJobs/\d+")
RUN_ID = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?")
"""`<name>-<8 hex>`, and the number that `--new` gives. One that was set by hand may look otherwise."""


class Run(Struct, frozen=True, kw_only=True):
    """A run and its jobs, the newest first."""

    id: str
    jobs: tuple[Job, ...]
    unread: tuple[str, ...] = ()
    """Regions that couldn't be read: it may have a job there too."""

    @property
    def job(self) -> Job:
        """The one that counts: the active one, else the newest."""
        return next((job for job in self.jobs if not job.has_ended), self.jobs[0])

    @property
    def is_active(self) -> bool:
        """Whether a job of it waits or runs."""
        return not self.job.has_ended


def look_up(vertex: Vertex, text: str, regions: Sequence[str]) -> tuple[Run, ...]:
    """The runs that `text` may mean, the newest first; the regions that couldn't be read are told.

    Raises:
        UsageError: there is none.
        UnreachableError: there is none in the regions that could be read.
        LaunchError: no region could be read.
    """
    if found := RESOURCE.fullmatch(text):
        job = vertex.get(text)
        wanted, regions = f'labels.{RUN_LABEL}="{job.run}"', [found["region"], *regions]
        if not job.run:
            raise UsageError(f"{text} isn't a job of launch's", f"gcloud ai custom-jobs describe {text}")
    else:
        wanted = f'labels.{RUN_LABEL}="{text}"' if RUN_ID.fullmatch(text) else f"labels.{RUN_LABEL}:*"
    listing = vertex.find(wanted, list(dict.fromkeys(regions)), partly=True)
    tell_unread(listing.unread, regions)
    exact = RESOURCE.fullmatch(text) is not None
    runs = tuple(run for run in grouped(listing.jobs) if exact or is_meant(run, text))
    if not runs and listing.unread:
        from launcher.apply.googleapis import UnreachableError

        where = f"{len(listing.unread)} of {len(set(regions))} regions"
        raise UnreachableError(f"no run {text} was found, but {where} couldn't be read", "Try again in a moment.")
    if not runs:
        where = f"in {regions[0]}" if len(regions) == 1 else f"in {len(regions)} regions"
        raise UsageError(
            f"there is no run {text} {where} of project {vertex.project}", "launch status lists all that there are."
        )
    return tuple(replace(run, unread=tuple(listing.unread)) for run in runs)


def all_runs(vertex: Vertex, regions: Sequence[str]) -> tuple[Run, ...]:
    """All of launch's runs, the newest first. Raises LaunchError: no region could be read."""
    listing = vertex.find(f"labels.{RUN_LABEL}:*", regions, partly=True)
    tell_unread(listing.unread, regions)
    return grouped(listing.jobs)


def one_run(vertex: Vertex, text: str, regions: Sequence[str]) -> Run:
    """The run that is meant: the only one, or the only active one. Raises UsageError: it could be several."""
    runs = look_up(vertex, text, regions)
    active = [run for run in runs if run.is_active]
    if len(runs) == 1 or len(active) == 1:
        return (active or runs)[0]
    listed = "\n".join(f"  {run.id}  {run.job.state}  {run.job.region}" for run in runs[:10])
    raise UsageError(f"{text} could be each of {len(runs)} runs", f"Name one by its id:\n{listed}")


def one_job(vertex: Vertex, text: str, regions: Sequence[str]) -> Job:
    """The job that is meant: by its own name or number, else the one that counts of a run. Raises UsageError."""
    run = one_run(vertex, text, regions)
    return next((job for job in run.jobs if text in (job.name, job.id)), run.job)


def grouped(jobs: Sequence[Job]) -> tuple[Run, ...]:
    """The jobs by their run, the newest run first."""
    runs: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: -job.created):
        runs.setdefault(job.run, []).append(job)
    return tuple(Run(id=name, jobs=tuple(found)) for name, found in runs.items())


def is_meant(run: Run, text: str) -> bool:
    """By id, by name, or by a job's number."""
    named = re.fullmatch(rf"{re.escape(text)}-[0-9a-f]{{8}}(-\d+)?", run.id) is not None
    return run.id == text or named or any(job.id == text for job in run.jobs)


def tell_unread(unread: dict[str, LaunchError], regions: Sequence[str]) -> None:
    """The regions that couldn't be read, those alike together. Raises the first error if none could."""
    if unread and len(unread) == len(set(regions)):
        raise next(iter(unread.values()))
    alike: dict[str, list[str]] = {}
    for region, error in unread.items():
        alike.setdefault(error.problem, []).append(region)
    for problem, names in alike.items():
        print(f"launch: {', '.join(names)} couldn't be read: {problem}", file=sys.stderr)


def searched(named: Sequence[str] | None) -> tuple[str, ...]:
    """The regions to look in: those named, else all that Vertex AI trains in. Raises UsageError: no such region."""
    from launcher import catalog

    known = catalog.load().training_regions
    for region in named or ():
        if region not in known and region != "any":
            near = get_close_matches(region, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(known)}."
            raise UsageError(f"--region {region}: Vertex AI trains in no such region", hint)
    return known if not named or "any" in named else tuple(dict.fromkeys(named))
