"""How attempts and runs end: what is noted of it, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from launcher.backend.base import GoneError, Service
from launcher.clock import Clock
from launcher.diagnosis import Diagnosis, exit_code
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, StillRunning, UsageError
from launcher.gcp.api import UnreachableError
from launcher.jobs.job import GONE, Job, command
from launcher.runs.attempts import RUN_ENDS, Entry, EntryEnd, attempts_summary, is_waited_out
from launcher.runs.ledger import Facts, Ledger

if TYPE_CHECKING:
    from launcher.plan.model import Plan
    from launcher.runs.snapshot import RunSnapshot

CONFIRM_SECONDS: Final = 300.0
POLL_SECONDS: Final = 2.0
CANCELLED: Final = Diagnosis(scope="permanent", kind="cancelled", cause="cancelled before it was made (launch cancel)")
LOST: Final = Diagnosis(scope="transient", kind="lost", cause="no job came of it")


class RunEnded(LaunchError):
    """The run has ended before, and nothing was started. `job` is None where it is no more to be seen."""

    exit_code = 3

    def __init__(self, problem: str, hint: str, job: Job | None, diagnosis: Diagnosis) -> None:
        super().__init__(problem, hint)
        self.job = job
        self.diagnosis = diagnosis


class RunSucceeded(RunEnded):
    """It has ended well."""

    exit_code = 0


def settle(ledger: Ledger, number: int, job: Job, diagnosis: Diagnosis, waited: float | None = None) -> EntryEnd:
    """Note how an attempt ended, and return what holds. `waited`: seconds for machines; None: as the job says.

    That is what was noted before, unless the job has come to an end of its own since: why a job was cancelled is known
    to whoever did it, who notes it first.
    """
    waited = job.waited if waited is None else waited
    return ledger.note_end(number, diagnosis_of_run(ledger, job, diagnosis), job.state, job.billed, waited)


def diagnosis_of_run(ledger: Ledger, job: Job, diagnosis: Diagnosis) -> Diagnosis:
    """What a job's end means for the run. One that succeeded while only others have claimed attempts has done nothing:
    its node found that, and ended with 0."""
    if job.state == "SUCCEEDED" and (holders := ledger.holders()) and job.id not in holders:
        return Diagnosis(scope="transient", kind="lost", cause=f"a duplicate: job {holders[-1]} has the run")
    return diagnosis


def release_resources(service: Service, job: Job, say: Callable[[str], None]) -> None:
    """Remove what an ended job has left. What can't be removed is told: it costs money."""
    try:
        service.release(job)
    except LaunchError as error:
        say(f"what is left of {job.name} can't be removed: {error.problem}\n{error.hint}".strip())


def cancel_and_confirm(service: Service, job: Job, clock: Clock, say: Callable[[str], None]) -> Job:
    """The job once it has ended, cancelled or otherwise. Raises StillRunning: that can't be confirmed in 5 minutes, so
    nothing may be created in its place."""
    until, asked, trouble = clock.now() + CONFIRM_SECONDS, False, ""
    while clock.now() < until:
        try:
            if not asked:
                service.cancel(job.name)
                asked = True
            job = service.get(job.name)
        except GoneError:
            return replace(job, state=GONE)
        except UnreachableError as error:
            if error.problem != trouble:
                say(error.problem)
            trouble = error.problem
        if job.is_over:
            return job
        clock.sleep(POLL_SECONDS)
    minutes = CONFIRM_SECONDS / 60
    raise StillRunning(
        f"{job.name} is {job.state} {minutes:.0f} minutes after it was to be cancelled; nothing else was created",
        f"launch cancel {job.run or job.name}; then type the same command again",
    )


def run_ended_error(plan: Plan, entry: Entry, snapshot: RunSnapshot) -> RunEnded:
    """That the run has ended, and how it would go on."""
    if entry.end is None:
        raise ValueError("an attempt that is open hasn't ended")
    job = next((job for job in snapshot.jobs if job.name == entry.job), None) or gone_vm(entry, plan)
    run = plan.run
    typed = command(vm=entry.zone is not None)
    if entry.end.kind == "succeeded":
        hint = f"{typed} --new starts it anew;\n{typed} --resume {run} goes on in its folder"
        return RunSucceeded(f"run {run} has succeeded; nothing was started", hint, job, entry.end.diagnosis)
    hint = f"{typed} --resume {run} goes on from its newest checkpoint;\n--new starts it anew"
    fix = "" if "--resume" in entry.end.fix else entry.end.fix
    problem = f"run {run} has ended, and nothing was started: {entry.end.cause}"
    return RunEnded(problem, f"{fix}\n{hint}".strip(), job, entry.end.diagnosis)


def gone_vm(entry: Entry, plan: Plan) -> Job | None:
    """The job of a VM that is gone, as it was noted; None on Vertex AI, which keeps jobs for long."""
    from launcher.runs.snapshot import filled, noted_job

    return filled(noted_job(entry), entry, plan) if entry.zone and entry.job else None


def no_attempt_left_error(plan: Plan, tries: Sequence[Entry]) -> LaunchError:
    """Return the error of a run for which no attempt is left, or no time to wait for machines.

    It lists what was tried, why each failed and what to do. Its exit code is that of the failure that stopped the run.
    """
    run, (lines, fixes) = plan.run, attempts_summary(tries)
    last = tries[-1].end if tries else None
    if is_waited_out(plan, tries) and not (last and last.stops):
        hours = (plan.limits.wait_total_seconds or 0) / 3600
        problem = f"run {run} has waited for machines as long as limits.wait_total allows ({hours:g} h)"
        longer = f"A longer wait in all: --set limits.wait_total={ceil(hours) * 2}h"
        return NoCapacity(f"{problem}; this was tried:\n{lines}", f"{longer}\n{fixes}".strip())
    if last is None or not last.stops:
        return NoCapacity(f"no place of the plan could take run {run}; this was tried:\n{lines}", fixes)
    code = exit_code(last.diagnosis)
    kinds = (UsageError, JobFailed, NotAuthorised, NoCapacity)
    kind = next((one for one in kinds if one.exit_code == code), LaunchError)
    return kind(f"run {run} was refused: {last.cause}" + (f"\n{lines}" if len(tries) > 1 else ""), fixes)


def block_next_attempt(ledger: Ledger, last: Job, diagnosis: Diagnosis) -> bool:
    """Block the next attempt of a run without an active job by locking its number as cancelled; return whether that
    was done.

    `diagnosis` is that of its last job, which nobody may have noted yet. Who has looked and goes for that number finds
    it taken, looks again, and sees that the run has ended. False: it had ended before, nobody has launched it with this
    ledger, or somebody was quicker and is making a job.
    """
    entries = ledger.entries()
    newest = next((entry for entry in reversed(entries) if entry.round), None)
    if newest is None or nothing_follows(newest, last, diagnosis):
        return False
    facts = Facts(
        number=entries[-1].number + 1,
        round=newest.round,
        region=newest.region,
        zone=newest.zone,
        provisioning=newest.provisioning,
        machine=newest.machine,
        identity=newest.identity,
    )
    entry = ledger.lock(facts)
    if entry is None:
        return False
    ledger.note_end(entry.number, CANCELLED, "CANCELLED")
    return True


def nothing_follows(newest: Entry, last: Job, diagnosis: Diagnosis) -> bool:
    """Whether nothing would follow; or a job may be on its way, which can be cancelled once it is there."""
    if newest.end:
        return newest.end.ends_run
    return newest.job is None or (newest.job == last.name and diagnosis.kind in RUN_ENDS)
