"""What is there of a run: its attempts in the ledger and its jobs in the cloud, seen at one moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from msgspec.structs import replace

from launcher.backend.base import GoneError, Service
from launcher.errors import UsageError
from launcher.jobs.job import GONE, IDENTITY_LABEL, RUN_LABEL, Job
from launcher.plan.model import Plan
from launcher.runs.attempts import Entry
from launcher.runs.ledger import Ledger

SLACK_SECONDS: Final = 30.0
"""Between the clocks of two of Google's services, and for a job that was created while the next lock was written."""
AT_ONCE_SECONDS: Final = 60.0
"""Between the VMs of two launches at the same moment."""


class RunSnapshot(NamedTuple):
    """Attempts, which were read first, and jobs (the newest first); `age` answers how many seconds ago the jobs were
    asked for.

    The order matters: a job that an attempt names must be among the jobs, and a lock that is written after the entries
    were read has the next number, which nobody can then take who acts upon this look.
    """

    entries: tuple[Entry, ...]
    jobs: tuple[Job, ...]
    age: Callable[[], float]

    @property
    def newest(self) -> Entry | None:
        """The newest attempt in the cloud."""
        return newest_of(self.entries)

    @property
    def decided(self) -> Entry | None:
        """The newest attempt of the newest round that came to an end of its own: what was lost, a duplicate above all,
        takes nothing back."""
        return next((one for one in reversed(self.tries(self.round)) if one.end and one.end.kind != "lost"), None)

    @property
    def next_number(self) -> int:
        """The number that a lock upon this look takes."""
        return self.entries[-1].number + 1 if self.entries else 1

    @property
    def round(self) -> int:
        """The newest round; 0: there was none."""
        return max((entry.round for entry in self.entries), default=0)

    def used_seconds(self, shutdown: int) -> float:
        """Return the seconds that the run's jobs were billed so far: each from start to end plus its shutdown. For jobs
        that can no longer be read (mostly VMs) the recorded time counts."""
        seen = {job.name for job in self.jobs}
        noted = (one.end.billed for one in self.entries if one.end and one.job not in seen)
        times = [*(job.billed for job in self.jobs), *noted]
        return sum(times) + shutdown * sum(time > 0 for time in times)

    def tries(self, in_round: int) -> list[Entry]:
        """The attempts of one round."""
        return [entry for entry in self.entries if entry.round == in_round]

    def is_new(self, job: Job) -> bool:
        """Whether this look knows nothing of a job."""
        return all(job.name != one.name for one in self.jobs) and all(job.name != one.job for one in self.entries)

    def unnamed(self) -> list[Job]:
        """The jobs that no attempt names, the newest first."""
        named = {entry.job for entry in self.entries}
        return [job for job in self.jobs if job.name not in named]

    def job_of(self, entry: Entry, written: Callable[[int], float | None]) -> Job | None:
        """The job of the newest attempt: the one that it names; or, when its maker died before that, the first one in
        its region since its lock."""
        if entry.job:
            return next((job for job in self.jobs if job.name == entry.job), None)
        there = [job for job in self.unnamed() if job.place == entry.where]
        locked = written(entry.number) if there else None
        return next((job for job in reversed(there) if locked is None or job.created >= locked - SLACK_SECONDS), None)


def newest_of(entries: Sequence[Entry]) -> Entry | None:
    """The newest attempt in the cloud; one of `launch local` in the same folder only takes a number."""
    return next((entry for entry in reversed(entries) if entry.round), None)


class RunObserver:
    """Looks at one run: called, it answers what is there now."""

    def __init__(
        self,
        plan: Plan,
        service: Service,
        ledger: Ledger,
        stopwatch: Callable[[], Callable[[], float]],
        also: Iterable[str] | None,
    ) -> None:
        """`also`: where else to look, once, if there is no ledger; None: wherever Vertex AI trains. A list
        of VMs is of all zones anyway."""
        self._filter = f'labels.{RUN_LABEL}="{plan.run}"'  # a value with dashes may need its quotes (AIP-160)
        self._places = tuple(dict.fromkeys(attempt.where for attempt in plan.attempts))
        self._is_vm = plan.target == "vm"
        self._plan, self._run, self._service, self._ledger = plan, plan.run, service, ledger
        self._stopwatch, self._also = stopwatch, also
        self._has_looked = False
        self._beside: tuple[Job, ...] = ()

    def __call__(self) -> RunSnapshot:
        """Raises UnreachableError and its like: a region that a job may be in can't be read."""
        entries = self._ledger.entries()
        age = self._stopwatch()
        jobs = self.jobs(entries)
        return RunSnapshot(entries, (*jobs, *self._missing(entries, jobs)), age)

    def jobs(self, entries: Sequence[Entry]) -> tuple[Job, ...]:
        """The run's jobs, the newest first.

        Without a ledger nothing tells of another region that was named before: the first look goes there too, as far
        as they can be read. They aren't waited for again, and what has ended there stays as it is.
        """
        needed = dict.fromkeys([*self._places, *(entry.where for entry in entries if entry.region)])
        extra = [] if self._has_looked or self._ledger.locks else self._elsewhere()
        found = self._service.find(self._filter, [*needed, *extra], partly=True)
        for region in needed:
            if region in found.unread:
                raise found.unread[region]
        mine = {job.name: job for job in found.jobs if job.run == self._run}  # whatever the service makes of a filter
        if extra:
            self._has_looked = True
            self._beside = tuple(job for job in mine.values() if job.place not in needed and job.is_over)
        mine = {**{job.name: job for job in self._beside}, **mine}
        return tuple(sorted(mine.values(), key=lambda job: (-job.created, job.name)))

    def _elsewhere(self) -> Sequence[str]:
        from launcher import catalog

        if self._is_vm:
            return []
        return catalog.load().training_regions if self._also is None else list(self._also)

    def _missing(self, entries: Sequence[Entry], jobs: Sequence[Job]) -> list[Job]:
        """The newest attempt's job by its name, if the list left it out: lists may be late, and jobs deleted."""
        newest = newest_of(entries)
        if newest is None or not newest.is_open or not newest.job or any(job.name == newest.job for job in jobs):
            return []
        with suppress(GoneError):
            job = filled(self._service.get(newest.job), newest, self._plan)
            if job.run == self._run:  # the folder may name any job
                return [job]
        labels = {RUN_LABEL: self._run}
        return [Job(name=newest.job, region=newest.region, state=GONE, created=0.0, labels=labels)]


def noted_job(entry: Entry) -> Job:
    """A job that is gone, as it was noted."""
    end = entry.end
    return Job(
        name=entry.job or "",
        region=entry.region,
        state=(end.state if end else None) or GONE,
        created=entry.time,
        started=entry.time if end and end.billed else None,
        ended=entry.time + end.billed if end and end.billed else None,
    )


def filled(job: Job, entry: Entry, plan: Plan) -> Job:
    """A job with what was asked for, as its attempt and the plan say it: nothing else tells that of a VM that is
    gone."""
    if job.request:
        return job
    asked = next((one for one in plan.attempts if one.where == entry.where), plan.attempts[0])
    labels = {RUN_LABEL: plan.run, **({IDENTITY_LABEL: entry.identity} if entry.identity else {})}
    return replace(job, request=asked.request, labels={**job.labels, **labels}, folder=plan.run_folder or "")


def choose(active: Sequence[Job], entries: Sequence[Entry], holder: Callable[[int], str]) -> Job:
    """The one of several active jobs that stays, the same for whoever looks: the one that has claimed the run; else
    that of an attempt that is open; else the oldest. One that is being cancelled only if there is no other.

    `entries` are those that everybody sees: none where each launch knows its own alone.
    """
    jobs = [job for job in active if job.state != "CANCELLING"] or active
    if len(jobs) == 1:
        return jobs[0]
    claimed = {job.id: job for job in jobs}
    for entry in reversed(entries):
        if found := claimed.get(holder(entry.number)):
            return found
    named = {entry.job for entry in entries if entry.is_open}
    return min([job for job in jobs if job.name in named] or jobs, key=lambda job: (job.created, job.name))


def check_workplaces(kept: Job, others: Sequence[Job]) -> None:
    """Two launches at the same moment may both have made a VM to work on; from then on its disk may hold work.

    Raises UsageError: there are others, and not since the same moment.
    """
    for job in others:
        if job.is_workplace and abs(job.created - kept.created) > AT_ONCE_SECONDS:
            raise UsageError(
                f"there are two VMs {job.run}, in {kept.place} and {job.place}; both were left alone",
                f"launch vm delete {job.run} --zone {job.place} deletes that one, with its disk",
            )


def entry_of(job: Job, entries: Sequence[Entry]) -> Entry | None:
    """The attempt of an active job: the newest that names it, or the newest of all if it is open, names none and is
    in the job's region."""
    named = next((entry for entry in reversed(entries) if entry.job == job.name), None)
    newest = newest_of(entries)
    fits = newest is not None and newest.end is None and newest.job is None and newest.where == job.place
    return named or (newest if fits else None)


def orphan(snapshot: RunSnapshot, written: Callable[[int], float | None], seen: Collection[str]) -> Job | None:
    """The newest job that has ended and that no attempt names, if it came with or after the newest attempt and wasn't
    `seen` before. A cancelled one was most likely one too many; where there is nothing else, it is the run's end."""
    ended = [job for job in snapshot.unnamed() if job.is_over and job.name not in seen]
    told = [job for job in ended if job.state != "CANCELLED"] or ([] if snapshot.entries else ended)
    if not told or not snapshot.entries:
        return told[0] if told else None
    locked = written(snapshot.entries[-1].number)
    return told[0] if locked is None or told[0].created >= locked - SLACK_SECONDS else None
