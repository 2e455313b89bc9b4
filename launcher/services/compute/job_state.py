"""Derive a training VM's job state and end from its status, its record in the run folder, and its operations.

With a record the job has ended, whatever the VM's status; a cancelled one ends when the VM goes down. Without a record
the VM's operations show how it ended; Google keeps them for about two weeks after its deletion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.common.contract import Exit
from launch_train.common.storage import Storage
from launch_train.common.storage import UnreachableError as NoAnswer
from launcher.diagnosis.job_end import HOST_ERROR, MAINTENANCE, PREEMPTED, STARTUP, STOPPED
from launcher.errors import UnreachableError
from launcher.gcp.storage import open_folder, use_errors
from launcher.jobs.job import GONE, RUN_LABEL, Failure, Job
from launcher.jobs.vm import DOWN, VmInstance
from launcher.services.compute.client import Operation

WAITING: Final = frozenset({"PENDING", "PROVISIONING", "STAGING"})
RUNNING: Final = frozenset({"RUNNING", "REPAIRING"})
"""An Instance's status. REPAIRING: after a host error, before Google restarts the VM."""
CREATE_KINDS: Final = frozenset({"insert", "bulkInsert"})
SYSTEM_STOPS: Final = {
    "compute.instances.preempted": PREEMPTED,
    "compute.instances.hostError": HOST_ERROR,
    "compute.instances.terminateOnHostMaintenance": MAINTENANCE,
}
"""Operations of Google's own (https://cloud.google.com/compute/docs/troubleshooting/troubleshooting-reboots)."""
CREATE_CANCELLED: Final = "OPERATION_CANCELED_BY_USER"
"""The error of a VM's insert if the VM is deleted meanwhile. The delete operation is more informative."""
SYSTEM: Final = "system"
"""The user of Google's own operations."""
CODES: Final = {400: 3, 403: 7, 404: 5, 409: 6, 412: 9, 429: 8, 500: 13, 501: 12, 503: 14, 504: 4}
"""HTTP status → google.rpc.Code."""
FOLDER_SECONDS: Final = 20.0
"""Timeout of one call to a run folder."""
BULK_INSERT_SECONDS: Final = 60.0
"""The creation times of one bulkInsert's VMs differ by at most this."""
SLACK_SECONDS: Final = 60.0
"""Between the time limit and Google's operation: `maxRunDuration` takes half a minute to act."""


class Record(Struct, frozen=True, kw_only=True):
    """The end of a VM. Times are Unix seconds.

    `ended` is None in the record of a cancellation, because the clock of the machine that wrote it may be wrong.
    """

    exit: int
    """The container's exit code; 70 (contract.Exit.UNFIT) if it never started."""
    reason: str = ""
    """Why the container never started."""
    name: str = ""
    zone: str = ""
    started: float | None = None
    ended: float | None = None
    cancelled: bool = False
    cleanup: str = ""
    """Why the VM could not delete itself, and the missing grant."""


class End(NamedTuple):
    """The end of a VM without a record. The `state` PENDING means that it is still being created."""

    state: str
    failure: Failure | None
    ended: float | None


# --- An existing VM ---------------------------------------------------------------------------------------------------


def job_of(machine: VmInstance, record: Record | None = None, operations: Sequence[Operation] = ()) -> Job:
    """Return the job of an existing VM. `operations` are needed if it went down without a record."""
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
        return replace(job, state="CANCELLING")  # recorded, but the delete request failed or was never sent
    if record is not None:
        return with_record(job, record)
    if machine.trains and machine.status in DOWN:
        unknown = End("FAILED", vm_stopped_failure(STOPPED), machine.stopped)
        end = end_of(operations, time_limit_of(machine)) or unknown
        failed = end if end.state in ("FAILED", "EXPIRED") else unknown
        return replace(job, state=failed.state, error=failed.failure, ended=failed.ended or machine.stopped)
    return job


def state_of(machine: VmInstance) -> str:
    """Return the job state for a VM's status."""
    if machine.status in WAITING:
        return "PENDING"
    if machine.status in RUNNING:
        return "RUNNING"
    if machine.status in DOWN and not machine.trains:
        return "STOPPED"  # a workstation may be started again
    return "CANCELLING"


def time_limit_of(machine: VmInstance) -> float | None:
    """Return the time at which Google ends the VM (maxRunDuration); None: no limit, or it never ran."""
    if machine.started is None or machine.limit_seconds is None:
        return None
    return machine.started + machine.limit_seconds


# --- A record ---------------------------------------------------------------------------------------------------------


def with_record(job: Job, record: Record) -> Job:
    """Return a job with the end that its VM's record describes."""
    job = replace(job, started=job.started or record.started, ended=record.ended)
    if record.cancelled:
        return replace(job, state="CANCELLED")
    if record.exit == 0:
        return replace(job, state="SUCCEEDED")
    return replace(job, state="FAILED", error=failure_of(record))


def unseen_job(name: str, machine: str, created: float) -> Job:
    """Return a job of which only its VM's record is known, or only the creation of its VM. `machine`: the VM's name."""
    zone = name.split("/")[3]
    labels = {RUN_LABEL: run_of_vm(machine)} if machine else {}
    return Job(name=name, region=zone.rpartition("-")[0], state="PENDING", created=created, labels=labels)


def failure_of(record: Record) -> Failure:
    """Return the error of a container that failed or never started."""
    message = f"The replica {record.name or 'of the VM'} exited with a non-zero status of {record.exit}."
    if not record.reason:
        return Failure(code=3, message=message)
    if record.exit == Exit.PREEMPTED:  # stopped before its container started
        return Failure(code=3, message=f"{message} {record.reason}", reason=STOPPED)
    return Failure(code=3, message=f"{message} {record.reason}", reason=STARTUP, metadata={"reason": record.reason})


# --- Operations -------------------------------------------------------------------------------------------------------


def job_of_deleted_vm(
    base: Job | None, name: str, operations: Sequence[Operation], time_limit: float | None
) -> Job | None:
    """Return the job of a VM that no longer exists, from its operations. None: they don't show its end.

    `base` is the job as it was last seen, or None.
    """
    end, creation = end_of(operations, time_limit), creation_of(operations)
    if end is None:
        return None
    first = creation or operations[-1]
    job = base or unseen_job(name, first.target_name, first.inserted)
    started = job.started or (creation.ended if creation and creation.done and not creation.refusal else None)
    return replace(job, state=end.state, error=end.failure, started=started, ended=end.ended)


def end_of(operations: Sequence[Operation], time_limit: float | None) -> End | None:
    """Return how a VM ended, from its operations (newest first). None: they don't show it.

    If `time_limit` is unknown, a deletion by Google itself counts as the time limit.
    """
    for operation in operations:
        refusal = operation.refusal
        if operation.kind in CREATE_KINDS and refusal and refusal.reason != CREATE_CANCELLED:
            code = CODES.get(refusal.code, 3 if refusal.code < 500 else 13)
            reason = refusal.reason or "UNKNOWN"
            failure = Failure(code=code, message=refusal.message, reason=reason, metadata=refusal.metadata)
            return End("FAILED", failure, operation.ended)
    creation = creation_of(operations)
    if creation and not creation.done and len(operations) == 1:
        return End("PENDING", None, None)
    if stop := next((operation for operation in operations if operation.kind in SYSTEM_STOPS), None):
        return End("FAILED", vm_stopped_failure(SYSTEM_STOPS[stop.kind]), stop.ended or stop.inserted)
    if deletion := next((operation for operation in operations if operation.kind == "delete"), None):
        late = time_limit is not None and deletion.inserted >= time_limit - SLACK_SECONDS
        state = "EXPIRED" if late or deletion.user == SYSTEM else GONE
        return End(state, None, deletion.ended or deletion.inserted)
    return None


def creation_of(operations: Sequence[Operation]) -> Operation | None:
    """Return the operation that created the VM, or None."""
    return next((operation for operation in operations if operation.kind in CREATE_KINDS), None)


def vm_stopped_failure(reason: str) -> Failure:
    """Return the error of a VM that stopped while its container ran."""
    return Failure(code=14, message=f"the VM stopped: {reason}", reason=reason)


def run_of_vm(machine: str) -> str:
    """Return the run id in a VM's name: RUN, or RUN-n<node> of several nodes."""
    head, _, number = machine.rpartition("-n")
    return head if head and number.isdecimal() else machine


# --- Records in the run folder ----------------------------------------------------------------------------------------


@contextmanager
def record_errors() -> Iterator[None]:
    """Raise UnreachableError without an answer; UsageError, NotAuthorised if the run folder can't be used."""
    try:
        with use_errors():
            yield
    except Exception as error:
        if isinstance(error.__cause__, NoAnswer):
            raise UnreachableError(str(error.__cause__), "Try again in a moment.") from error
        raise


def read_record(folder: Storage, number: str) -> Record | None:
    """Return the record of a VM; None: it does not exist or is malformed. Raises as `record_errors` does."""
    name = runfolder.machine_end(number)
    try:
        with record_errors():
            record = msgspec.json.decode(folder.read(name), type=Record)
            return record if record.ended else replace(record, ended=folder.written(name))
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def read_records(folder: Storage) -> dict[str, Record]:
    """Return all records of a run by VM number. Raises as `record_errors` does."""
    with use_errors():
        names = folder.list(f"{runfolder.MACHINES}/")
    numbers = [name.rpartition("/")[2].removesuffix(".json") for name in names]
    return {number: record for number in numbers if (record := read_record(folder, number))}


def create_record(folder: Storage, number: str, record: Record) -> bool:
    """Write the record of a VM; return False if one exists, which is kept. Raises as `record_errors` does."""
    try:
        with record_errors():
            folder.write(runfolder.machine_end(number), msgspec.json.encode(record), create=True)
    except FileExistsError:
        return False
    return True


def training_end(machine: VmInstance) -> Record | None:
    """Return the record of how a VM's training ended, from its run folder. None: it has not ended.

    With several VMs it is the one that ended first. Raises LaunchError: the folder can't be read.
    """
    folder = str(machine.parameters.get("run_folder", ""))
    if not folder:
        return None
    records = read_records(open_folder(folder).within(FOLDER_SECONDS))
    if own := records.get(machine.id):
        return own
    if len(names := nodes_of(machine)) == 1:
        return None
    together = [record for record in records.values() if record.zone == machine.zone and record.name in names]
    # VMs of an earlier attempt have the same names.
    later = [record for record in together if (record.ended or 0.0) > machine.created]
    return min(later, key=lambda record: record.ended or 0.0, default=None)


# --- The VMs of one job: their metadata lists the names of all its nodes ----------------------------------------------


def nodes_of(machine: VmInstance) -> tuple[str, ...]:
    """Return the names of all VMs of a VM's job, itself included, node 0 first."""
    nodes = machine.parameters.get("nodes")
    return tuple(map(str, nodes)) if isinstance(nodes, list) and nodes else (machine.name,)


def is_head(machine: VmInstance) -> bool:
    """Return whether the VM is node 0, which identifies the job."""
    return nodes_of(machine)[0] == machine.name


def vms_of_job(machine: VmInstance, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return an existing VM and those of `fleet` that belong to the same job."""
    names = nodes_of(machine)
    others = (vm for vm in fleet if vm.name in names and vm.zone == machine.zone and vm.run == machine.run)
    return (machine, *(vm for vm in others if vm.id != machine.id and vm.trains))


def remaining_vms(job: Job, fleet: Sequence[VmInstance]) -> tuple[VmInstance, ...]:
    """Return the VMs of `fleet` that an ended job left behind.

    VMs of another attempt in the same zone are excluded: they have another node 0, or were created later.
    """
    same_run = [vm for vm in fleet if vm.zone == job.zone and vm.run == job.run and vm.trains]
    if any(is_head(vm) and vm.id != job.id for vm in same_run):
        return tuple(vm for vm in same_run if vm.id == job.id)
    return tuple(vm for vm in same_run if vm.id == job.id or abs(vm.created - job.created) <= BULK_INSERT_SECONDS)
