"""Runs that are in the cloud, found by what a person types: a run's name, id or folder, a job's number or its
resource name."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launcher import catalog
from launcher.backend import request
from launcher.cli.flows import find_local_run
from launcher.errors import LaunchError, NotAuthorised, UsageError
from launcher.jobs.job import IDENTITY_LABEL, RESOURCE, RUN_LABEL, Job
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    from launcher.backend.base import Listing
    from launcher.cli.flows.cloud import CloudContext

ENGINE = "Compute Engine"
RUN_ID = re.compile(r"[a-z][a-z0-9-]*-[0-9a-f]{8}(-\d+)?")
"""`<name>-<8 hex>`, and the number that `--new` gives. One that was set by hand may look otherwise."""


class NoSuchRun(UsageError):
    """Nothing that can be seen belongs to such a run."""


class Run(Struct, frozen=True, kw_only=True):
    """A run and its jobs, the newest first."""

    id: str
    jobs: tuple[Job, ...]
    unread: tuple[str, ...] = ()
    """Regions that couldn't be read: it may have a job there too."""

    @property
    def job(self) -> Job:
        """The one that counts: the active one, else the newest."""
        return next((job for job in self.jobs if not job.is_over), self.jobs[0])

    @property
    def is_active(self) -> bool:
        """Whether a job of it waits or runs."""
        return not self.job.is_over


def find_run(text: str, regions: Sequence[str] | None) -> find_local_run.LocalRun | Run:
    """Return the run that a person means by an id, a name, a path, or a job's number.

    A path or an id in ./runs is a run on this machine. A name means the run in the cloud if one exists there: a
    rehearsal must not hide the job that is billed. With `regions` only the cloud is searched.

    Raises:
        UsageError: no such run, a folder that is not a run's, or a name that several runs have.
        LaunchError: the cloud can't be searched, and no run on this machine has that name.
    """
    from launcher.gcp.api import UnreachableError
    from launcher.workspace.gcloud_config import setting

    if not regions and (exact := find_local_run.exact_run(text)):
        return exact
    found = () if regions else find_local_run.named_runs(text)
    if found and not setting("core/project", os.environ):
        return find_local_run.only(text, found)
    try:
        run = cloud_run(text, regions)
    except (NoSuchRun, NotAuthorised, UnreachableError) as error:
        if not found:
            raise
        if not isinstance(error, NoSuchRun):
            print(f"launch: the cloud was not searched: {error.problem}", file=sys.stderr)
        return find_local_run.only(text, found)
    if found:
        print(f"launch: {find_local_run.shown(found[0])} on this machine has that name too", file=sys.stderr)
    return run


def cloud_run(text: str, regions: Sequence[str] | None) -> Run:
    """Return the run in the cloud. Raises LaunchError."""
    from launcher.cli.flows.cloud import here

    try:
        cloud = here()
    except UsageError as error:
        raise UsageError(f"no run {text} in ./{find_local_run.RUNS}, and {error.problem}", error.hint) from error
    return one_run(cloud, text, searched(regions))


def look_up(cloud: CloudContext, text: str, regions: Sequence[str]) -> tuple[Run, ...]:
    """The runs that `text` may mean, the newest first; the regions that couldn't be read are told.

    Raises:
        UsageError: there is none.
        UnreachableError: there is none in the regions that could be read.
        LaunchError: no region could be read.
    """
    if text.startswith("gs://"):
        return (of_folder(cloud, text),)
    if RESOURCE.fullmatch(text):
        job = cloud.service.get(text)
        wanted, regions = f'labels.{RUN_LABEL}="{job.run}"', [job.region, *regions]
        if not job.run:
            raise UsageError(f"{text} isn't a job of launch's", f"gcloud ai custom-jobs describe {text}")
    else:
        wanted = f'labels.{RUN_LABEL}="{text}"' if RUN_ID.fullmatch(text) else f"labels.{RUN_LABEL}:*"
    listing = everywhere(cloud, wanted, list(dict.fromkeys(regions)))
    exact = RESOURCE.fullmatch(text) is not None
    runs = tuple(run for run in grouped(listing.jobs) if exact or is_meant(run, text))
    if not runs and (kept := in_default_folder(cloud, text)):
        return (kept,)
    if not runs and listing.unread:
        from launcher.gcp.api import UnreachableError

        count = len(listing.unread.keys() - {ENGINE})
        unread = [f"{count} of {len(set(regions))} regions"] * bool(count) + [ENGINE] * (ENGINE in listing.unread)
        where = " and ".join(unread)
        raise UnreachableError(f"no run {text} was found, but {where} couldn't be read", "Try again in a moment.")
    if not runs:
        where = f"in {regions[0]}" if len(regions) == 1 else f"in {len(regions)} regions"
        raise NoSuchRun(
            f"there is no run {text} {where} of project {cloud.project}",
            f"{find_local_run.here_instead(text)}"
            "launch status lists all that there are; a run on VMs that has ended is found\n"
            "by its folder, gs://…/RUN. A VM to work on: launch vm status NAME",
        )
    return tuple(replace(run, unread=tuple(listing.unread)) for run in runs)


def all_runs(cloud: CloudContext, regions: Sequence[str]) -> tuple[Run, ...]:
    """All of launch's runs, the newest first. Raises LaunchError: no region could be read."""
    return grouped(everywhere(cloud, f"labels.{RUN_LABEL}:*", regions).jobs)


def everywhere(cloud: CloudContext, filter_: str, regions: Sequence[str]) -> Listing:
    """The jobs of these regions, VMs that train among them; what couldn't be read is told. Raises LaunchError: nothing
    could be."""
    from launcher.backend.base import Listing

    found = cloud.vertex.find(filter_, regions, partly=True)
    vms, unread = found.jobs[:0], dict(found.unread)
    whole = set(regions) >= set(catalog.load().training_regions)  # VMs may be in others too
    try:
        trains = (job for job in cloud.vms.find(filter_, ()).jobs if IDENTITY_LABEL in job.labels)
        vms = tuple(job for job in trains if whole or job.region in regions)
    except LaunchError as error:
        if "is disabled" not in error.problem:  # without that API there are no VMs
            unread[ENGINE] = error
    tell_unread(unread, [*regions, ENGINE] if ENGINE in unread else regions)
    return Listing(tuple(sorted((*found.jobs, *vms), key=lambda job: (-job.created, job.name))), unread)


def one_run(cloud: CloudContext, text: str, regions: Sequence[str]) -> Run:
    """The run that is meant: the only one, or the only active one. Raises UsageError: it could be several."""
    runs = look_up(cloud, text, regions)
    active = [run for run in runs if run.is_active]
    if len(runs) == 1 or len(active) == 1:
        return (active or runs)[0]
    listed = "\n".join(f"  {run.id}  {run.job.state}  {run.job.place}" for run in runs[:10])
    raise UsageError(f"{text} could be each of {len(runs)} runs", f"Name one by its id:\n{listed}")


def one_job(cloud: CloudContext, text: str, regions: Sequence[str]) -> Job:
    """The job that is meant: by its own name or number, else the one that counts of a run. Raises UsageError."""
    run = one_run(cloud, text, regions)
    return next((job for job in run.jobs if text in (job.name, job.id)), run.job)


def of_folder(cloud: CloudContext, folder: str) -> Run:
    """The run that writes to a folder, by what lies there. Raises UsageError: none does, and LaunchError."""
    if run := in_folder(cloud, folder.rstrip("/")):
        return run
    raise UsageError(f"{folder} is no run's folder, or its run has had no job", "It is OUTPUT/RUN, with a plan.json.")


def in_default_folder(cloud: CloudContext, text: str) -> Run | None:
    """Find a run by its id in the default output. None: it doesn't exist or isn't readable, or the bucket isn't the
    project's."""
    from launcher.gcp.default_bucket import check_default_bucket
    from launcher.plan.names import default_output

    if not RUN_ID.fullmatch(text):
        return None
    try:
        check_default_bucket(cloud.project, os.environ, cloud.clock)
        return in_folder(cloud, f"{default_output(cloud.project)}/{text}")
    except LaunchError:
        return None


def in_folder(cloud: CloudContext, folder: str) -> Run | None:
    """The run that a folder holds the plan of, with its newest attempt's job: VMs that train are gone when they have
    ended, and nothing but the folder tells of them. None: it holds none, or its plan or its job is another run's."""
    from launcher.backend.base import GoneError
    from launcher.gcp.storage import open_folder
    from launcher.runs.ledger import BucketLedger
    from launcher.runs.snapshot import job_from_entry, with_request

    ledger = BucketLedger.open(folder)
    stored = ledger.stored()
    entry = next((one for one in reversed(ledger.entries()) if one.job), None)
    if stored is None or entry is None or entry.job is None:
        return None
    plan = stored.plan
    if any(one != folder for one in (plan.run_folder, *(request.run_folder(each.request) for each in plan.attempts))):
        return None
    try:
        job = with_request(cloud.of_run(open_folder(folder)).get(entry.job), entry, plan)
    except GoneError:
        job = with_request(job_from_entry(entry), entry, plan)
    return Run(id=plan.run, jobs=(job,)) if job.run == plan.run else None


def grouped(jobs: Sequence[Job]) -> tuple[Run, ...]:
    """The jobs by their run, the newest run first."""
    runs: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: -job.created):
        runs.setdefault(job.run, []).append(job)
    return tuple(Run(id=name, jobs=tuple(found)) for name, found in runs.items())


def is_meant(run: Run, text: str) -> bool:
    """By id, by name, or by a job's number."""
    return find_local_run.is_named(run.id, text) or any(job.id == text for job in run.jobs)


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
    known = catalog.load().training_regions
    for region in named or ():
        if region not in known and region != "any":
            hint = did_you_mean(near(region, known, most=3), f"There are {', '.join(known)}.")
            raise UsageError(f"--region {region}: Vertex AI trains in no such region", hint)
    return known if not named or "any" in named else tuple(dict.fromkeys(named))
