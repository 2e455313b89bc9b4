"""Find a run by its name, ID or folder: in ./runs, or in the cloud by the labels of its jobs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.common import contract
from launcher import catalog
from launcher.errors import LaunchError, UnreachableError, UsageError
from launcher.gcp.default_bucket import check_default_bucket
from launcher.gcp.storage import open_folder, use_errors
from launcher.jobs.job import RESOURCE, RUN_ID, RUN_LABEL, Job
from launcher.plan.binding import NewerFormat
from launcher.plan.names import default_output
from launcher.remote.connection import connect_to
from launcher.runs.context import ENGINE, LaunchContext, LocalContext, RunContext
from launcher.runs.ledger import Ledger
from launcher.runs.on_host import HostContext, host_and_run, remember, remembered_hosts
from launcher.runs.run_folder import storage_of
from launcher.runs.snapshot import job_from_entry, with_request
from launcher.services import request
from launcher.services.base import GoneError
from launcher.services.local.run_folder_job import HIDDEN, is_run_folder, read_job, shown
from launcher.text import did_you_mean, near

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.runs.cloud import CloudContext

RUNS = "runs"
"""The default output of `launch local`, in the current folder."""
SHOWN = 10
"""Maximum number of runs that an error lists."""


class NoSuchRun(UsageError):
    """No such run was found."""


class FoundRun(Struct, frozen=True, kw_only=True):
    """A run at one moment: its jobs, the newest first, and where it is."""

    id: str
    jobs: tuple[Job, ...]
    context: RunContext
    unread: tuple[str, ...] = ()
    """Regions that could not be read; the run may have a job there."""

    @property
    def job(self) -> Job:
        """Return the active job, else the newest."""
        return next((job for job in self.jobs if not job.is_over), self.jobs[0])

    @property
    def is_active(self) -> bool:
        """Return whether a job of the run is waiting or running."""
        return not self.job.is_over

    @property
    def folder(self) -> str | None:
        """Return the run folder; None: the run has none."""
        return request.run_folder(self.job.request)

    @property
    def storage(self) -> Storage | None:
        """Return the opened run folder; None: the run has none, or it cannot be opened."""
        return storage_of(self.folder)


# --- This machine ----------------------------------------------------------------------------------------------------


def exact_run(text: str) -> FoundRun | None:
    """Return the run at a path, or with an ID in ./runs. Raises UsageError: a path that is not a run folder."""
    if text.startswith(("gs://", "projects/")):
        return None
    if place := host_and_run(text):
        return host_run(*place)
    for path in (Path(text), Path(RUNS, text)):
        if is_run_folder(path) and (run := local_run(path.resolve())):
            to = "" if "/" in text else moved_to(path)  # a path means this folder, wherever its run is
            return (host_run(*place) if (place := host_and_run(to)) else exact_run(to) if to else None) or run
    if host := remembered_hosts(lambda run: run == text).get(text):
        try:
            return host_run(host, text)
        except NoSuchRun as error:
            remember(text, None)
            raise NoSuchRun(f"{text} has no job on {host}: it was deleted, or refused there", error.hint) from None
    if "/" in text or text in (".", "..", RUNS):
        path = Path(text)
        inside = run_folders(path) or run_folders(path.parent)
        is_there = os.path.exists(path)  # noqa: PTH110 -- Path.exists raises on a name that is too long
        problem = f"{path} is not a run folder" if is_there else f"folder {path} does not exist"
        if inside:
            more = [f"  … and {len(inside) - SHOWN} more"] if len(inside) > SHOWN else []
            names = "\n".join([*(f"  {shown(folder)}" for folder in inside[:SHOWN]), *more])
            raise UsageError(problem, f"Name one of these runs:\n{names}")
        raise UsageError(problem, "Name a run folder (OUTPUT/RUN), or a run: launch runs lists the runs.")
    return None


def run_without_job(host: str, run: str, context: HostContext) -> FoundRun | None:
    """Return a run in the default folder of a host, which has had no job there: it was moved to that folder, or the
    host refused its job. None: it is not there."""
    path = f"~/launch/{RUNS}/{run}"
    storage = open_folder(f"ssh://{host}/{path}")
    with use_errors():
        if runfolder.PLAN not in storage.list(runfolder.PLAN):
            return None
        created = storage.written(runfolder.PLAN)
        plan = storage.read(runfolder.PLAN)
    env = [{"name": contract.RUN_FOLDER, "value": path}]
    body = {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"env": env}}]}}
    labels = {RUN_LABEL: run}
    request_there = {"host": host, "labels": labels, "job": body}
    with suppress(ValueError, LookupError, TypeError):
        request_there["script"] = json.loads(plan)["attempts"][0]["request"]["script"]
    job = Job(
        name=f"on/{host}/{run}",
        region=host,
        state="INTERRUPTED",
        created=created,
        labels=labels,
        request=request_there,
    )
    return FoundRun(id=run, jobs=(job,), context=context)


def moved_to(folder: Path) -> str:
    """Return the folder to which a run was moved from this machine; empty: it was not moved."""
    try:
        return str(json.loads((folder / runfolder.MOVED).read_bytes())["to"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def host_run(host: str, text: str) -> FoundRun:
    """Return the newest run with an ID or name on a host. Raises UsageError: there is none; LaunchError: no
    connection."""
    context = HostContext(connection=connect_to(host))
    runs = grouped(context.find_jobs(f"labels.{RUN_LABEL}:*", ()).jobs, context)
    if run := next((run for run in runs if is_named(run.id, text)), None):
        return run
    if run := run_without_job(host, text, context):
        return run
    known = ", ".join(run.id for run in runs[:SHOWN]) or "none"
    raise NoSuchRun(
        f"no run {text} on {host}", f"{similar_names(text, (run.id for run in runs))}It has: {known}".strip()
    )


def local_run(folder: Path) -> FoundRun | None:
    """Return the run in a folder on this machine; None: it has just been deleted."""
    job = read_job(folder)
    return FoundRun(id=folder.name, jobs=(job,), context=LocalContext()) if job else None


def named_runs(name: str) -> tuple[FoundRun, ...]:
    """Return the runs with a name in ./runs, newest first; then those on hosts."""
    folders = (folder for folder in run_folders(Path(RUNS)) if is_named(folder.name, name))
    here = tuple(run for folder in folders if (run := local_run(folder)))
    there, errors = [], []
    for known, host in remembered_hosts(lambda run: is_named(run, name)).items():
        try:
            there.append(host_run(host, known))
        except LaunchError as error:  # a host that is gone must not hide the others
            errors.append(error)
    if errors and not here and not there:
        raise errors[0]
    return (*here, *there)


def is_named(run: str, text: str) -> bool:
    """Return whether `text` is a run's ID, or its name without the digest."""
    return run == text or re.fullmatch(rf"{re.escape(text)}-[0-9a-f]{{8}}(-\d+)?", run) is not None


def run_folders(folder: Path) -> tuple[Path, ...]:
    """Return the absolute paths of the run folders in a folder, newest first."""
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(HIDDEN) and is_run_folder(path)]
        inside.sort(key=lambda path: (-path.stat().st_mtime, path.name))
    except OSError:
        return ()
    return tuple(dict.fromkeys(path.resolve() for path in inside))  # a link to a run is the same run


def label_of(folder: Path, label: str) -> str:
    """Return a label of a run's spec; empty if it has none, or if its plan cannot be read."""
    try:
        text = (folder / runfolder.PLAN).read_bytes()
        if label.encode() not in text:  # most runs: parsing each plan would take a second for a thousand
            return ""
        return str(json.loads(text)["spec"]["labels"][label])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def similar_names(text: str, ids: Iterable[str]) -> str:
    """Return `Did you mean quickstart?` with the ID or name of a run that is most like a text; empty: none is."""
    names = [name for run in ids for name in (run, re.sub(r"-[0-9a-f]{8}(-\d+)?$", "", run))]
    return did_you_mean(near(text, names))


def here_instead(text: str) -> str:
    """Return a hint that `text` is a run on this machine, for commands that only take runs in the cloud; else empty."""
    try:
        run = exact_run(text) or next(iter(named_runs(text)), None)
    except UsageError:
        return ""
    return f"{run.job.handle} is a run on this machine: launch status {run.job.handle}\n" if run else ""


# --- The cloud -------------------------------------------------------------------------------------------------------


def look_up(cloud: CloudContext, text: str, regions: Sequence[str]) -> tuple[FoundRun, ...]:
    """Return the runs that match `text`, newest first; report the regions that could not be read.

    Raises:
        UsageError: none matches.
        UnreachableError: none matches in the regions that could be read.
        LaunchError: no region could be read.
    """
    if text.startswith("gs://"):
        run = in_folder(cloud, text.rstrip("/"))
        if run is None:
            raise UsageError(
                f"{text} is not a run folder, or its run never had a job",
                "A run folder is OUTPUT/RUN, with a plan.json.",
            )
        return (run,)
    if re.fullmatch(RESOURCE, text):
        job = cloud.service.get(text)
        wanted, regions = f'labels.{RUN_LABEL}="{job.run}"', [job.region, *regions]
        if not job.run:
            raise UsageError(f"{text} was not created by launch", f"gcloud ai custom-jobs describe {text}")
    else:
        wanted = f'labels.{RUN_LABEL}="{text}"' if re.fullmatch(RUN_ID, text) else f"labels.{RUN_LABEL}:*"
    listing = cloud.find_jobs(wanted, list(dict.fromkeys(regions)))
    exact = re.fullmatch(RESOURCE, text) is not None
    runs = tuple(run for run in grouped(listing.jobs, cloud) if exact or has_name(run, text))
    if not runs and (kept := in_default_folder(cloud, text)):
        return (kept,)
    if not runs and listing.unread:
        count = len(listing.unread.keys() - {ENGINE})
        unread = [f"{count} of {len(set(regions))} regions"] * bool(count) + [ENGINE] * (ENGINE in listing.unread)
        where = " and ".join(unread)
        raise UnreachableError(f"no run {text} was found, but {where} could not be read", "Try again in a moment.")
    if not runs:
        where = f"in {regions[0]}" if len(regions) == 1 else f"in {len(regions)} regions"
        close = similar_names(text, (job.run for job in listing.jobs))
        raise NoSuchRun(
            f"no run {text} {where} of project {cloud.project}",
            f"{here_instead(text)}{f'{close} ' if close else ''}"
            "launch runs lists the runs. A finished run on VMs is found by its folder,\n"
            "gs://…/RUN. For a VM to work on: launch vm status NAME",
        )
    return tuple(replace(run, unread=tuple(listing.unread)) for run in runs)


def all_runs(cloud: LaunchContext, regions: Sequence[str] | None) -> tuple[FoundRun, ...]:
    """Return all of launch's runs, newest first: on Vertex AI those in `regions` (default: all with GPUs), on VMs those
    in `regions` (default: all zones). Raises LaunchError: no region could be read."""
    places = searched(regions) if regions else catalog.load().gpu_regions
    return grouped(cloud.find_jobs(f"labels.{RUN_LABEL}:*", places, all_vms=not regions).jobs, cloud)


def one_run(cloud: CloudContext, text: str, regions: Sequence[str]) -> FoundRun:
    """Return the only matching run, or the only active one. Raises UsageError: several match."""
    runs = look_up(cloud, text, regions)
    if run := only_one(runs):
        return run
    listed = "\n".join(f"  {run.id}  {run.job.state}  {run.job.place}" for run in runs[:10])
    raise UsageError(f"{text} matches {len(runs)} runs", f"Use a run ID:\n{listed}")


def only_one(runs: Sequence[FoundRun]) -> FoundRun | None:
    """Return the only run, or the only active one; None: there are several."""
    active = [run for run in runs if run.is_active]
    return (active or runs)[0] if len(runs) == 1 or len(active) == 1 else None


def in_default_folder(cloud: CloudContext, text: str) -> FoundRun | None:
    """Find a run by its ID in the default output. None: not there, not readable, or not the project's bucket."""
    if not re.fullmatch(RUN_ID, text):
        return None
    try:
        check_default_bucket(cloud.project, os.environ, cloud.clock)
        return in_folder(cloud, f"{default_output(cloud.project)}/{text}")
    except NewerFormat:
        raise
    except LaunchError:
        return None


def in_folder(cloud: CloudContext, folder: str) -> FoundRun | None:
    """Return the run in a folder, with its newest attempt's job, or None if the plan or the job is of another run.

    Only the folder knows runs on VMs that have ended: these VMs are deleted.
    """
    ledger = Ledger.open(folder)
    stored = ledger.stored()
    entry = next((recorded for recorded in reversed(ledger.entries()) if recorded.job), None)
    if stored is None or entry is None or entry.job is None:
        return None
    plan = stored.plan
    if any(
        place != folder for place in (plan.run_folder, *(request.run_folder(each.request) for each in plan.attempts))
    ):
        return None
    try:
        job = with_request(cloud.of_run(open_folder(folder)).get(entry.job), entry, plan)
    except GoneError:
        job = with_request(job_from_entry(entry), entry, plan)
    return FoundRun(id=plan.run, jobs=(job,), context=cloud) if job.run == plan.run else None


def grouped(jobs: Sequence[Job], context: RunContext) -> tuple[FoundRun, ...]:
    runs: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: -job.created):
        runs.setdefault(job.run, []).append(job)
    return tuple(FoundRun(id=name, jobs=tuple(own_jobs), context=context) for name, own_jobs in runs.items())


def has_name(run: FoundRun, text: str) -> bool:
    """Return whether `text` is the run's ID or name, or the number of one of its jobs."""
    return is_named(run.id, text) or any(job.id == text for job in run.jobs)


def searched(named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the regions to search: those named, else all with Vertex AI training. Raises UsageError."""
    known = catalog.load().training_regions
    for region in named or ():
        if region not in known and region != "any":
            hint = did_you_mean(near(region, known, most=3), f"Available: {', '.join(known)}")
            raise UsageError(f"--region: Vertex AI training is not available in {region}", hint)
    return known if not named or "any" in named else tuple(dict.fromkeys(named))
