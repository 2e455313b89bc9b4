"""List all runs, those in a folder on this machine and those in the cloud, as one type."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.common.storage import OutputError, Storage
from launcher import catalog
from launcher.errors import LaunchError, UsageError
from launcher.gcp.parallel import together
from launcher.gcp.storage import open_folder
from launcher.inputs.gather import project
from launcher.inputs.gcloud_config import person
from launcher.jobs.job import OWNER_LABEL, SWEEP_LABEL, Job
from launcher.plan.names import is_owned_by
from launcher.runs.cloud import open_cloud
from launcher.runs.context import LaunchContext, LocalContext
from launcher.runs.find import RUNS, FoundRun, all_runs, is_named
from launcher.runs.local_progress import read_local_progress
from launcher.runs.metrics.progress import Progress, parse_record
from launcher.runs.sweep.record import parse_points, record_name
from launcher.services import request
from launcher.services.local.run_folder_job import jobs_below

if TYPE_CHECKING:
    from launcher.runs.sweep.find import Sweep

NEWEST: Final = 30
"""Number of newest ended runs and sweeps in the cloud whose progress is read; more would make the list slow."""
CLOUD_SECONDS: Final = 20.0
"""Time limit for listing the runs in the cloud; after it, only those on this machine are listed."""
ANSWER_SECONDS: Final = 5.0
"""Timeout of reading one run's progress."""
READERS: Final = 16
"""Run folders read in parallel."""


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run in a list. Times are Unix seconds; None: unknown."""

    run: str
    target: str
    """local, vertex, vm, …"""
    state: str
    """As `launch status` has it (docs/output.md)."""
    created: float
    """Creation of its newest job or, on this machine, start of its newest attempt."""
    owner: str = ""
    """`me`, another account's owner label, or the name of another user of this machine; empty: unknown."""
    labels: Mapping[str, str] = {}
    progress: Progress | None = None
    usd: float | None = None
    """Cost of its known jobs so far, without disks; 0 on this machine."""
    folder: str | None = None
    problem: str = ""
    """Why it could not be read completely."""
    job: Job
    """The active job, else the newest."""
    points: int = 0
    """Number of points of its sweep, by the sweep's record; 0: unknown."""

    @property
    def is_active(self) -> bool:
        """Return whether it is waiting or running."""
        return not self.job.is_over

    @property
    def sweep(self) -> str:
        """Return the name of its sweep; empty if it is not part of one."""
        return self.labels.get(SWEEP_LABEL, "")

    @property
    def loss(self) -> float | None:
        """Return its newest loss; None if it has none or if it is not finite."""
        loss = self.progress.loss if self.progress else None
        return loss if loss is not None and math.isfinite(loss) else None


class ListedSweep(Struct, frozen=True, kw_only=True):
    """The runs of one sweep, newest first, all on this machine or all in the cloud."""

    name: str
    runs: tuple[ListedRun, ...]

    @property
    def points(self) -> int:
        """Return the number of points, as far as known with those that have not begun."""
        return max(len(self.runs), self.runs[0].points)

    @property
    def finished(self) -> int:
        """Return the number of runs that succeeded."""
        return sum(run.state == "SUCCEEDED" for run in self.runs)

    @property
    def best(self) -> ListedRun | None:
        """Return the run with the lowest loss; None: no loss is known."""
        return min((run for run in self.runs if run.loss is not None), key=lambda run: run.loss or 0.0, default=None)

    @property
    def usd(self) -> float | None:
        """Return the sum of the costs; None: one is unknown."""
        costs = [run.usd for run in self.runs]
        return None if None in costs else sum(cost for cost in costs if cost)


class RunFilter(Struct, frozen=True, kw_only=True):
    """Selects the runs to list. A field that is empty or None selects all."""

    mine: bool = False
    states: tuple[str, ...] = ()
    name: str | None = None
    """A run's ID, or its name without the digest; may have wildcards (`*`)."""
    labels: Mapping[str, str | None] = {}
    """Label -> its value; None: any value."""
    since: float | None = None
    """Unix seconds; earlier runs are not listed."""

    def matches(self, run: ListedRun) -> bool:
        has_name = self.name is None or is_named(run.run, self.name) or fnmatchcase(run.run, self.name)
        has_labels = all(
            name in run.labels and value in (None, run.labels[name]) for name, value in self.labels.items()
        )
        return (
            has_name
            and has_labels
            and (not self.mine or run.owner == "me")
            and (not self.states or run.state.lower() in {state.lower() for state in self.states})
            and (self.since is None or run.created >= self.since)
        )


class RunList(Struct, frozen=True, kw_only=True):
    """The runs, newest first. `unlisted` is the error because of which those in the cloud are missing, or None."""

    runs: tuple[ListedRun, ...]
    unlisted: LaunchError | None = None


def runs(
    target: Literal["local", "cloud"] | None = None,
    *,
    mine: bool = False,
    states: Sequence[str] = (),
    name: str | None = None,
    labels: Mapping[str, str | None] | None = None,
    since: float | None = None,
    folder: str | Path = RUNS,
    regions: Sequence[str] | None = None,
) -> RunList:
    """Return the runs in `folder` and those of gcloud's project, newest first; `target` asks for one of the two.

    `states` are those of `launch status`; `name` may have wildcards; a label without a value (None) must exist; `since`
    is in Unix seconds. `regions` are searched in the cloud; default: those with GPUs on Vertex AI. If the cloud cannot
    be listed, `unlisted` of the result says why.

    Raises LaunchError: `target` is cloud, and it cannot be listed.
    """
    wanted = RunFilter(mine=mine, states=tuple(states), name=name, labels=labels or {}, since=since)
    return list_runs(lambda: open_cloud(project("vertex", os.environ)), wanted, target, Path(folder), regions)


def newest_first(run: ListedRun) -> tuple[float, str]:
    """Return what sorts runs, newest first."""
    return -run.created, run.run


def list_runs(
    open_cloud: Callable[[], LaunchContext],
    wanted: RunFilter,
    target: Literal["local", "cloud"] | None = None,
    folder: Path = Path(RUNS),
    regions: Sequence[str] | None = None,
) -> RunList:
    """Return the runs that a filter asks for, as `runs` does."""
    if target == "cloud":
        return RunList(runs=tuple(list_cloud(open_cloud(), wanted, regions)))
    runs_here = (FoundRun(id=job.id, jobs=(job,), context=LocalContext()) for job in jobs_below(folder))
    entries = (with_local_progress(entry_of(run, "", 0.0)) for run in runs_here)
    here = [entry for entry in entries if wanted.matches(entry)]
    here = with_points(here, lambda path: Path(path).read_bytes())
    there: list[ListedRun] | LaunchError = []
    if target != "local":
        there = together({"cloud": lambda: list_cloud(open_cloud(), wanted, regions)}, CLOUD_SECONDS)["cloud"]
    unlisted = there if isinstance(there, LaunchError) else None
    listed = here if isinstance(there, LaunchError) else [*here, *there]
    return RunList(runs=tuple(sorted(listed, key=newest_first)), unlisted=unlisted)


def group_sweeps(listed: Sequence[ListedRun]) -> list[ListedRun | ListedSweep]:
    """Combine the runs of each sweep into one entry, at the position of its newest run."""
    groups: dict[tuple[str, bool], list[ListedRun]] = {}
    for run in listed:
        groups.setdefault(group_key(run), []).append(run)
    return [ListedSweep(name=runs[0].sweep, runs=tuple(runs)) if runs[0].sweep else runs[0] for runs in groups.values()]


def group_key(run: ListedRun) -> tuple[str, bool]:
    """Return a key that is the same for all runs of one sweep, and unique for a run without a sweep."""
    return run.sweep or f"run {run.run}", run.target == "local"


def entry_of(run: FoundRun, account: str, now: float) -> ListedRun:
    """Return a run as an entry of the list, without its progress. `account`: gcloud's, or empty."""
    job, costs = run.job, [job_usd(job, now) for job in run.jobs]
    owner = "me" if is_owned_by(job.labels, account) else job.labels.get(OWNER_LABEL, "")
    return ListedRun(
        run=run.id,
        target="slurm" if "script" in job.request else job.target,
        state=job.state,
        created=job.begun,
        owner=user_name(job.request["user"]) if job.is_here else owner,
        labels=job.labels,
        usd=None if None in costs else sum(cost for cost in costs if cost),
        folder=run.folder,
        problem=job.error.message if job.is_here and job.error else "",
        job=job,
    )


def job_usd(job: Job, now: float) -> float | None:
    """Return the cost of a job's machines so far in USD, without disks; None: the price is unknown.

    It is 0 before they started, and on this machine.
    """
    if job.started is None or job.is_here:
        return 0.0
    requested, known = request.read(job.request), catalog.load()
    shapes = known.machines.get(requested.machine_type, ())
    alike = [shape for shape in shapes if shape.gpus == requested.gpus] or (shapes if len(shapes) == 1 else ())
    if not alike:
        return None
    price = known.price(alike[0], "compute" if job.zone else "vertex", requested.provisioning, job.place)
    hours = max(0.0, (job.ended or now) - job.started) / 3600
    return None if price.usd is None else price.usd * requested.nodes * hours


def user_name(number: int) -> str:
    """Return `me`, or the name of another user of this machine."""
    import pwd

    if number == os.getuid():
        return "me"
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def with_local_progress(run: ListedRun) -> ListedRun:
    """Return a run on this machine with its progress, or why it is unreadable."""
    try:
        return replace(run, progress=read_local_progress(Path(run.folder or "")))
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else str(error)
        return replace(run, problem=run.problem or f"unreadable: {text}")


def list_cloud(cloud: LaunchContext, wanted: RunFilter, regions: Sequence[str] | None) -> list[ListedRun]:
    """Return the runs in the cloud, newest first. Raises LaunchError: no region could be read."""
    account = person(os.environ)
    if wanted.mine and not account:
        raise UsageError("--mine needs gcloud's account, and none is set", "gcloud auth login")
    now = time.time()
    entries = (entry_of(run, account, now) for run in all_runs(cloud, regions))
    return with_progress(sorted(filter(wanted.matches, entries), key=newest_first))


def listed_points(
    sweep: Sweep, others: Sequence[FoundRun], account: str, now: float
) -> tuple[list[ListedRun], list[str]]:
    """Return the points of a sweep that have begun, in their order, and the IDs of the others. `others` are runs of it
    without listed jobs."""
    points = [with_local_progress(entry_of(run, "", now)) for run in (sweep.here.runs if sweep.here else ())]
    points += with_progress(
        [entry_of(run, account, now) for run in (*(sweep.cloud.runs if sweep.cloud else ()), *others)]
    )
    order = {run: place for place, run in enumerate(sweep.known)}
    points.sort(key=lambda point: (order.get(point.run, len(order)), point.target != "local"))
    begun = {point.run for point in points}
    return points, [run for run in order if run not in begun]


def with_progress(listed: Sequence[ListedRun]) -> list[ListedRun]:
    """Return the runs; add the progress of the active and the newest ones, with one read each, in parallel, and the
    number of points of their sweeps."""
    ended = [*dict.fromkeys(group_key(run) for run in listed if not run.is_active)][:NEWEST]
    chosen = [run for run in listed if run.folder and (run.is_active or group_key(run) in ended)]
    buckets: dict[str, Storage] = {}
    for url in {bucket_of(run.folder) for run in chosen if run.folder} - {""}:
        with suppress(LaunchError):
            buckets[url] = open_folder(url).within(ANSWER_SECONDS)

    def read(url: str) -> bytes:
        bucket = bucket_of(url)
        if bucket not in buckets:
            raise FileNotFoundError(url)
        return buckets[bucket].read(url.removeprefix(bucket).strip("/"))

    def read_progress(run: ListedRun) -> ListedRun:
        with suppress(FileNotFoundError, OutputError):
            return replace(run, progress=parse_record(read(f"{run.folder}/{runfolder.PROGRESS}")))
        return run

    with ThreadPoolExecutor(READERS) as threads:
        complete = {run.run: run for run in with_points([*threads.map(read_progress, chosen)], read)}
    return [complete.get(run.run, run) for run in listed]


def with_points(listed: Sequence[ListedRun], read: Callable[[str], bytes]) -> list[ListedRun]:
    """Return the runs with the number of points of their sweeps, whose records `read` reads."""
    outputs = {run.sweep: run.folder.rpartition("/")[0] for run in listed if run.sweep and run.folder}
    points = {}
    for sweep, output in outputs.items():
        with suppress(OSError, OutputError):
            points[sweep] = len(parse_points(read(f"{output}/{record_name(sweep)}")))
    return [replace(run, points=points.get(run.sweep, 0)) for run in listed]


def bucket_of(folder: str) -> str:
    """Return gs://BUCKET of a folder in a bucket; empty for another folder."""
    return "/".join(folder.split("/")[:3]) if folder.startswith("gs://") else ""
