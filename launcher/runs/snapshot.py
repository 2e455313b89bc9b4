"""A run at one moment: its attempts in the ledger and its jobs in the cloud."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec.structs import replace

from launcher import catalog
from launcher.errors import UsageError
from launcher.jobs.job import GONE, IDENTITY_LABEL, RUN_LABEL, Job
from launcher.plan.model import Plan
from launcher.runs.attempts import AttemptEntry
from launcher.runs.ledger import Ledger
from launcher.services.base import GoneError, Service

SLACK_SECONDS: Final = 30.0
"""Tolerance for the difference between two Google services' clocks, and for a job that was created while the next lock
was written."""
CONCURRENT_SECONDS: Final = 60.0
"""VMs created within so many seconds of each other may come from two concurrent launches."""


class RunSnapshot(NamedTuple):
    """A run's attempts and jobs (newest first). `age` returns the seconds since the jobs were listed.

    The attempts are read before the jobs: a job that an attempt names must be among the jobs. And if another launch
    writes a lock after the attempts were read, it takes the next number, so a launch that acts on this snapshot can't.
    """

    entries: tuple[AttemptEntry, ...]
    jobs: tuple[Job, ...]
    age: Callable[[], float]

    @property
    def newest(self) -> AttemptEntry | None:
        return newest_of(self.entries)

    @property
    def last_outcome(self) -> AttemptEntry | None:
        """Return the newest attempt of the newest round with an end other than lost. A lost attempt, for example a
        duplicate, does not change the run's outcome."""
        return next(
            (entry for entry in reversed(self.tries(self.round)) if entry.end and entry.end.kind != "lost"), None
        )

    @property
    def next_number(self) -> int:
        return self.entries[-1].number + 1 if self.entries else 1

    @property
    def round(self) -> int:
        """Return the newest round; 0: none yet."""
        return max((entry.round for entry in self.entries), default=0)

    def used_seconds(self, shutdown: int) -> float:
        """Return the seconds that the run's jobs were billed so far: each from start to end plus its shutdown. For jobs
        that can no longer be read (mostly VMs) the recorded time counts."""
        readable = {job.name for job in self.jobs}
        recorded = (entry.end.billed for entry in self.entries if entry.end and entry.job not in readable)
        times = [*(job.billed for job in self.jobs), *recorded]
        return sum(times) + shutdown * sum(time > 0 for time in times)

    def tries(self, in_round: int) -> list[AttemptEntry]:
        return [entry for entry in self.entries if entry.round == in_round]

    def is_new(self, job: Job) -> bool:
        """Return whether a job is neither among the jobs nor named by an attempt."""
        return all(job.name != one.name for one in self.jobs) and all(job.name != one.job for one in self.entries)

    def unrecorded_jobs(self) -> list[Job]:
        """Return the jobs that no attempt names, newest first."""
        recorded = {entry.job for entry in self.entries}
        return [job for job in self.jobs if job.name not in recorded]

    def job_of(self, entry: AttemptEntry, locked_at: Callable[[int], float | None]) -> Job | None:
        """Return the job of the newest attempt: the recorded one or, if the launch died before it recorded one, the
        first job in the attempt's placement since its lock."""
        if entry.job:
            return next((job for job in self.jobs if job.name == entry.job), None)
        candidates = [job for job in self.unrecorded_jobs() if job.place == entry.where]
        locked = locked_at(entry.number) if candidates else None
        oldest_first = reversed(candidates)
        return next((job for job in oldest_first if locked is None or job.created >= locked - SLACK_SECONDS), None)


def newest_of(entries: Sequence[AttemptEntry]) -> AttemptEntry | None:
    """Return the newest attempt in the cloud, or None. Attempts of `launch local` in the same folder don't count."""
    return next((entry for entry in reversed(entries) if entry.round), None)


class RunObserver:
    """Take snapshots of one run, one per call."""

    def __init__(
        self,
        plan: Plan,
        service: Service,
        ledger: Ledger,
        stopwatch: Callable[[], Callable[[], float]],
        extra_regions: Iterable[str] | None,
    ) -> None:
        """`extra_regions`: searched once if there are no locks; None: all regions with Vertex AI training. A search
        for VMs covers all zones anyway."""
        self._filter = f'labels.{RUN_LABEL}="{plan.run}"'  # a value with dashes may need its quotes (AIP-160)
        self._places = tuple(dict.fromkeys(attempt.where for attempt in plan.attempts))
        self._has_regions = plan.target == "vertex"
        self._plan, self._run, self._service, self._ledger = plan, plan.run, service, ledger
        self._stopwatch, self._extra_regions = stopwatch, extra_regions
        self._searched_extra = False
        self._ended_elsewhere: tuple[Job, ...] = ()

    def __call__(self) -> RunSnapshot:
        """Take a snapshot. Raises LaunchError, mostly UnreachableError: a region that may have a job can't be read."""
        entries = self._ledger.entries()
        age = self._stopwatch()
        jobs = self.jobs(entries)
        return RunSnapshot(entries, (*jobs, *self._missing(entries, jobs)), age)

    def jobs(self, entries: Sequence[AttemptEntry]) -> tuple[Job, ...]:
        """Return the run's jobs, newest first.

        Without a ledger, earlier launches may have used regions that are not in this plan. The first call searches
        those too, as far as they can be read; later calls reuse the ended jobs found there.
        """
        needed = dict.fromkeys([*self._places, *(entry.where for entry in entries if entry.region)])
        extra = [] if self._searched_extra or self._ledger.locks else self._regions_to_search()
        listing = self._service.find(self._filter, [*needed, *extra], partly=True)
        for region in needed:
            if region in listing.unread:
                raise listing.unread[region]
        jobs = {job.name: job for job in listing.jobs if job.run == self._run}  # in case the service ignores the filter
        if extra:
            self._searched_extra = True
            self._ended_elsewhere = tuple(job for job in jobs.values() if job.place not in needed and job.is_over)
        jobs = {**{job.name: job for job in self._ended_elsewhere}, **jobs}
        return tuple(sorted(jobs.values(), key=lambda job: (-job.created, job.name)))

    def _regions_to_search(self) -> Sequence[str]:
        if not self._has_regions:
            return []
        return catalog.load().training_regions if self._extra_regions is None else list(self._extra_regions)

    def _missing(self, entries: Sequence[AttemptEntry], jobs: Sequence[Job]) -> list[Job]:
        """Get the newest attempt's job by name if it was not listed: lists may lag, and jobs may be deleted."""
        newest = newest_of(entries)
        if newest is None or not newest.is_open or not newest.job or any(job.name == newest.job for job in jobs):
            return []
        with suppress(GoneError):
            job = with_request(self._service.get(newest.job), newest, self._plan)
            if job.run == self._run:  # others can write to the folder, so it may name any job
                return [job]
        labels = {RUN_LABEL: self._run}
        return [Job(name=newest.job, region=newest.region, state=GONE, created=0.0, labels=labels)]


def job_from_entry(entry: AttemptEntry) -> Job:
    """Return a deleted job as its ledger entry describes it."""
    end = entry.end
    return Job(
        name=entry.job or "",
        region=entry.region,
        state=(end.state if end else None) or GONE,
        created=entry.time,
        started=entry.time if end and end.billed else None,
        ended=entry.time + end.billed if end and end.billed else None,
    )


def with_request(job: Job, entry: AttemptEntry, plan: Plan) -> Job:
    """Return a job with its request, labels and folder taken from the plan, if it has no request: a deleted VM."""
    if job.request:
        return job
    attempt = next((planned for planned in plan.attempts if planned.where == entry.where), plan.attempts[0])
    labels = {RUN_LABEL: plan.run, **({IDENTITY_LABEL: entry.identity} if entry.identity else {})}
    return replace(job, request=attempt.request, labels={**job.labels, **labels}, folder=plan.run_folder or "")


def choose_active_job(active: Sequence[Job], entries: Sequence[AttemptEntry], claimed_by: Callable[[int], str]) -> Job:
    """Return the one of several active jobs to keep; every launch chooses the same one.

    That is the job that claimed the run, else the job of an open attempt, else the oldest. A job that is being
    cancelled is chosen only if there is no other. `entries` are those that all launches see: none without a ledger.
    """
    jobs = [job for job in active if job.state != "CANCELLING"] or active
    if len(jobs) == 1:
        return jobs[0]
    claimed = {job.id: job for job in jobs}
    for entry in reversed(entries):
        if claimant := claimed.get(claimed_by(entry.number)):
            return claimant
    named = {entry.job for entry in entries if entry.is_open}
    return min([job for job in jobs if job.name in named] or jobs, key=lambda job: (job.created, job.name))


def check_duplicate_workstations(kept: Job, others: Sequence[Job]) -> None:
    """Refuse to delete a duplicate workstation VM unless two concurrent launches created it: its disk may hold work.

    Raises UsageError: a duplicate was created at another time.
    """
    for job in others:
        if job.is_workplace and abs(job.created - kept.created) > CONCURRENT_SECONDS:
            raise UsageError(
                f"two VMs are named {job.run}, in {kept.place} and {job.place}; neither was changed",
                f"To delete one with its disk: launch vm delete {job.run} --zone {job.place}",
            )


def newest_unrecorded_end(
    snapshot: RunSnapshot, locked_at: Callable[[int], float | None], seen: Collection[str]
) -> Job | None:
    """Return the newest ended job that no attempt names, unless it is older than the newest attempt or in `seen`.

    A cancelled job was most likely a duplicate; it counts only in a run without any attempt.
    """
    ended = [job for job in snapshot.unrecorded_jobs() if job.is_over and job.name not in seen]
    candidates = [job for job in ended if job.state != "CANCELLED"] or ([] if snapshot.entries else ended)
    if not candidates or not snapshot.entries:
        return candidates[0] if candidates else None
    locked = locked_at(snapshot.entries[-1].number)
    return candidates[0] if locked is None or candidates[0].created >= locked - SLACK_SECONDS else None
