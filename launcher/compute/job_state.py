"""A VM that trains as a job: its state, and how it ended, from what Google and its own record say. Pure.

As soon as there is a record the job has ended, whatever becomes of the VM; but one that was cancelled only when the VM
goes down. Without a record the VM's operations tell; they outlive it by two weeks or so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from launch_train.common.contract import Exit
from launcher.compute.end_record import Record
from launcher.compute.operations import Operation
from launcher.diagnosis.vm_end import HOST_ERROR, MAINTENANCE, PREEMPTED, STARTUP, STOPPED
from launcher.jobs.job import GONE, RUN_LABEL, Failure, Job
from launcher.jobs.vm import DOWN, Machine

WAITING: Final = frozenset({"PENDING", "PROVISIONING", "STAGING"})
RUNNING: Final = frozenset({"RUNNING", "REPAIRING"})
"""States of an Instance. REPAIRING: Google is at it, and the VM comes back."""
MAKES: Final = frozenset({"insert", "bulkInsert"})
TAKES: Final = {
    "compute.instances.preempted": PREEMPTED,
    "compute.instances.hostError": HOST_ERROR,
    "compute.instances.terminateOnHostMaintenance": MAINTENANCE,
}
"""Operations of Google's own (https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-reboots)."""
BROKEN_OFF: Final = "OPERATION_CANCELED_BY_USER"
"""The error of a VM's insert when the VM is deleted meanwhile: the delete tells more."""
SYSTEM: Final = "system"
"""The user of Google's own operations."""
CODES: Final = {400: 3, 403: 7, 404: 5, 409: 6, 412: 9, 429: 8, 500: 13, 501: 12, 503: 14, 504: 4}
"""HTTP's status -> google.rpc.Code."""
SLACK_SECONDS: Final = 60.0
"""Between an end that was set and Google's operation: `maxRunDuration` takes half a minute."""


class End(NamedTuple):
    """How a VM without a record ended, or (`state` PENDING) that it is still being made."""

    state: str
    failure: Failure | None
    ended: float | None


# --- A VM that is there -----------------------------------------------------------------------------------------------


def job_of(machine: Machine, record: Record | None = None, operations: Sequence[Operation] = ()) -> Job:
    """A VM as a job. `operations` are asked for where it went down without a record."""
    job = Job(
        name=machine.resource,
        region=machine.region,
        state=state_of(machine),
        created=machine.created,
        started=machine.started if machine.status not in WAITING else None,
        labels=machine.labels,
        request=machine.request,
        folder=str(machine.parameters.get("run_folder") or ""),
    )
    if record is not None and record.cancelled and machine.status in WAITING | RUNNING:
        return replace(job, state="CANCELLING")  # noted, and not deleted: whoever did it died, or was not heard
    if record is not None:
        return of_record(job, record)
    if machine.trains and machine.status in DOWN:
        end = end_of(operations, ceiling_of(machine)) or End("FAILED", stopped(STOPPED), machine.stopped)
        failed = end if end.state in ("FAILED", "EXPIRED") else End("FAILED", stopped(STOPPED), machine.stopped)
        return replace(job, state=failed.state, error=failed.failure, ended=failed.ended or machine.stopped)
    return job


def state_of(machine: Machine) -> str:
    """The job's state by the VM's alone."""
    if machine.status in WAITING:
        return "PENDING"
    if machine.status in RUNNING:
        return "RUNNING"
    if machine.status in DOWN and not machine.trains:
        return "STOPPED"  # to be started again: no end
    return "CANCELLING"


def ceiling_of(machine: Machine) -> float | None:
    """When Google ends it, or has ended it; None: it has no limit, or never ran."""
    if machine.started is None or machine.limit_seconds is None:
        return None
    return machine.started + machine.limit_seconds


def is_on_its_way(machine: Machine) -> bool:
    """Whether it goes down."""
    return machine.status not in WAITING | RUNNING | DOWN


# --- By its record ----------------------------------------------------------------------------------------------------


def of_record(job: Job, record: Record) -> Job:
    """A job whose VM has a record of its end."""
    job = replace(job, started=job.started or record.started, ended=record.ended)
    if record.cancelled:
        return replace(job, state="CANCELLED")
    if record.exit == 0:
        return replace(job, state="SUCCEEDED")
    return replace(job, state="FAILED", error=failure_of(record))


def of_records_alone(name: str, record: Record) -> Job:
    """What is known of a job by its VM's record alone."""
    zone = name.split("/")[3]
    labels = {RUN_LABEL: run_of(record.name)} if record.name else {}
    created = record.started or 0.0
    return Job(name=name, region=zone.rpartition("-")[0], state="PENDING", created=created, labels=labels)


def failure_of(record: Record) -> Failure:
    """The error of a container that failed, or was never started."""
    said = f"The replica {record.name or 'of the VM'} exited with a non-zero status of {record.exit}."
    if not record.reason:
        return Failure(code=3, message=said)
    if record.exit == Exit.PREEMPTED:  # told to stop before it had got as far
        return Failure(code=3, message=f"{said} {record.reason}", reason=STOPPED)
    return Failure(code=3, message=f"{said} {record.reason}", reason=STARTUP, metadata={"said": record.reason})


# --- By its operations ------------------------------------------------------------------------------------------------


def gone(base: Job | None, name: str, operations: Sequence[Operation], ceiling: float | None) -> Job | None:
    """The job of a VM that is no more there: `base` is as it was last seen, by whoever asks. None: nothing tells of
    it."""
    end, made = end_of(operations, ceiling), making(operations)
    if end is None:
        return None
    job = base or of_operation(name, made or operations[-1])
    started = job.started or (made.ended if made and made.done and not made.failed else None)
    return replace(job, state=end.state, error=end.failure, started=started, ended=end.ended)


def end_of(operations: Sequence[Operation], ceiling: float | None) -> End | None:
    """How a VM ended, by its operations, the newest first; None: they don't tell. Without a `ceiling` a delete by
    Google itself is taken for its limit."""
    refused = (one for one in operations if one.kind in MAKES and one.failed and one.refusal.reason != BROKEN_OFF)
    if failed := next(refused, None):
        return End("FAILED", of_refused(failed), failed.ended)
    made = making(operations)
    if made and not made.done and len(operations) == 1:
        return End("PENDING", None, None)
    if taken := next((one for one in operations if one.kind in TAKES), None):
        return End("FAILED", stopped(TAKES[taken.kind]), taken.ended or taken.inserted)
    if deleted := next((one for one in operations if one.kind == "delete"), None):
        late = ceiling is not None and deleted.inserted >= ceiling - SLACK_SECONDS
        state = "EXPIRED" if late or deleted.user == SYSTEM else GONE
        return End(state, None, deleted.ended or deleted.inserted)
    return None


def making(operations: Sequence[Operation]) -> Operation | None:
    """The operation that made the VM."""
    return next((one for one in operations if one.kind in MAKES), None)


def of_refused(operation: Operation) -> Failure:
    """The error of an operation."""
    refusal = operation.refusal
    code = CODES.get(refusal.code, 3 if refusal.code < 500 else 13)
    reason = refusal.reason or "UNKNOWN"
    return Failure(code=code, message=refusal.message, reason=reason, metadata=refusal.metadata)


def stopped(reason: str) -> Failure:
    """A VM that went away from under its container."""
    return Failure(code=14, message=f"the VM went away: {reason}", reason=reason)


def of_operation(name: str, made: Operation) -> Job:
    """What is known of a job by the operation alone that made its VM: a VM has its run's name, with its node's number
    where there are several."""
    zone = name.split("/")[3]
    labels = {RUN_LABEL: run_of(made.target_name)} if made.target_name else {}
    return Job(name=name, region=zone.rpartition("-")[0], state="PENDING", created=made.inserted, labels=labels)


def run_of(machine: str) -> str:
    """The run that a VM's name tells of."""
    head, _, number = machine.rpartition("-n")
    return head if head and number.isdecimal() else machine
