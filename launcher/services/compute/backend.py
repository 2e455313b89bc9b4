"""Compute Engine as a backend: training VMs as jobs.

A run's job is its VM, or node 0 of several VMs; their metadata says which VMs belong together. A VM is identified by
its number, because its name may be reused; everything deleted here is deleted by number.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Final

from launch_train.common.contract import Exit
from launch_train.common.storage import Storage
from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UnreachableError
from launcher.gcp.api import open_session, service_account, status_of
from launcher.gcp.parallel import together
from launcher.gcp.storage import open_folder
from launcher.jobs.job import RUN_LABEL, Job
from launcher.jobs.vm import DOWN, VmInstance
from launcher.plan.model import Attempt
from launcher.services import request
from launcher.services.base import GoneError, Listing, OfGoogle
from launcher.services.compute.client import SERVICE, Compute
from launcher.services.compute.create import create_vms
from launcher.services.compute.job_state import (
    CREATE_KINDS,
    FOLDER_SECONDS,
    RUNNING,
    WAITING,
    Record,
    create_record,
    creation_of,
    is_head,
    job_of,
    job_of_deleted_vm,
    nodes_of,
    read_record,
    read_records,
    remaining_vms,
    time_limit_of,
    unseen_job,
    vms_of_job,
    with_record,
)

SELF_DELETE_SECONDS: Final = 30.0
"""Time in which a VM whose container has ended must delete itself."""
RELEASE_SECONDS: Final = 180.0
POLL_SECONDS: Final = 2.0
NAME: Final = re.compile(r"projects/[^/]+/zones/(?P<zone>[^/]+)/instances/(?P<number>\d+)")


class Vms(OfGoogle):
    """The VMs of one project as jobs. Thread-safe."""

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        notice: Callable[[str], None] | None = None,
        folder: Storage | None = None,
        account: str = "",
    ) -> None:
        """`notice` shows a line to the user.

        `folder` is the run folder, if all calls are about one run; it has the records of deleted VMs. `account` is
        gcloud's, for credentials that don't name their account.
        """
        self.project = project
        self.clock = clock
        self.compute = Compute(project, environ, clock, notice)
        self._notice = notice or (lambda _line: None)
        self._account = account
        self._folder = folder.within(FOLDER_SECONDS) if folder else None
        self._folders: dict[str, Storage] = {}
        self._seen: dict[str, VmInstance] = {}
        self._created: dict[str, Job] = {}
        self._lock = threading.Lock()

    def for_run(self, folder: Storage | None) -> Vms:
        """Return a copy for one run, whose folder has the records of deleted VMs."""
        other = copy(self)
        other._folder = folder.within(FOLDER_SECONDS) if folder else None
        return other

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """Request the VMs of an attempt and return their job. It is PENDING; whether there is capacity is known later.

        Raises:
            CreateRefused: nothing was created. Also, as a transient error, while an earlier attempt's VM has the name.
            UnreachableError: unknown whether a job was created; or one existed and is running.
            LaunchError: the request is invalid and was not sent.
        """
        job = create_vms(self.compute, self._record_of, attempt, body, request_id)
        self._created[job.id] = job
        return job

    def get(self, name: str) -> Job:
        """Return a job's current or final state.

        Raises GoneError: no such VM, and no record of its end; UnreachableError: no answer for a minute.
        """
        zone, number = parse_job_name(name)
        try:
            machine = self.compute.instance(zone, number)
        except GoneError as error:
            return self._deleted_job(name, error)
        return self._existing_job(machine)

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """Return the jobs in all zones that match a filter. `regions` (or zones) must be readable.

        A filter for any run (labels.launch-run:*) finds training VMs only; one for a single run also finds its
        workstation. Unless `partly`, raises the first error.
        """
        places = list(dict.fromkeys(regions))
        try:
            fleet = self.compute.instances(filter_)
        except LaunchError as error:
            if not partly:
                raise
            return Listing((), dict.fromkeys(places, error))
        wanted = [machine for machine in fleet.machines if is_head(machine) and (machine.trains or ":*" not in filter_)]
        jobs = together({machine.id: partial(self._existing_job, machine) for machine in wanted})
        failed = {machine.zone: jobs[machine.id] for machine in wanted if isinstance(jobs[machine.id], LaunchError)}
        unlisted = {zone: UnreachableError(f"Compute Engine: {zone}: {words}") for zone, words in fleet.unread.items()}
        unread = errors_in(places, {**unlisted, **failed})
        if unread and not partly:
            raise next(iter(unread.values()))
        return Listing(tuple(job for machine in wanted if isinstance(job := jobs[machine.id], Job)), unread)

    def request_ids(self, name: str) -> frozenset[str]:
        """Return the ids of the requests by which the user's own account created a VM, alone or with others.

        They come from the VM's operations, which nobody can change. Empty once Google has deleted those, or if the
        account is unknown.
        """
        account = service_account(open_session(SERVICE, self.compute.environ)[0].credentials) or self._account
        if not account:
            return frozenset()
        zone, number = parse_job_name(name)
        creation = creation_of(self.compute.operations_of(zone, number))
        if creation is None:
            return frozenset()
        group = self.compute.operations_of_group(zone, creation.group) if creation.group else ()
        mine = (
            operation
            for operation in (creation, *group)
            if operation.kind in CREATE_KINDS and operation.user == account
        )
        return frozenset(operation.request_id for operation in mine if operation.request_id)

    def cancel(self, name: str) -> None:
        """Record that a job was cancelled, and begin to delete its VMs, which get half a minute to save.

        Does nothing if it has ended. Raises GoneError; UnreachableError: the VM does not exist yet.
        """
        zone, number = parse_job_name(name)
        try:
            machine = self.compute.instance(zone, number)
        except GoneError as error:
            if self._deleted_job(name, error).is_over:
                return
            problem = f"{name} is still being created and can't be cancelled yet"
            raise UnreachableError(problem, "Try again in a moment.") from error
        if machine.trains:
            self._note_cancelled(machine)
        for vm in self._vms_of_job(machine):
            self._delete(vm)

    def forget(self, job: Job) -> None:
        """Do nothing: an ended VM is deleted, and its operations can't be."""

    def release(self, job: Job) -> None:
        """Delete the VMs of an ended job, and wait until they are deleted.

        A VM whose container has ended deletes itself. VMs of other attempts and workstations are not touched.

        Raises LaunchError: a VM still exists and is billed.
        """
        began = self.clock.now()
        deleted: set[str] = set()
        while remaining := self._remaining_vms(job):
            waited = self.clock.now() - began
            if waited >= RELEASE_SECONDS:
                raise still_exists_error(remaining)
            for machine in remaining:
                due = machine.status in DOWN or waited >= SELF_DELETE_SECONDS
                if due and machine.id not in deleted:
                    deleted.add(machine.id)
                    self._report_reason(machine)
                    self._delete(machine)
            self.clock.sleep(POLL_SECONDS)

    # --- A job --------------------------------------------------------------------------------------------------------

    def _existing_job(self, machine: VmInstance) -> Job:
        with self._lock:
            self._seen[machine.id] = machine
        try:
            record = self._record_of(machine)
        except LaunchError as error:  # the VM's own status is enough while it exists
            self._notice(f"can't read the record of {machine.name} in its run folder: {error.problem}")
            record = None
        went_down = machine.trains and record is None and machine.status in DOWN
        return job_of(machine, record, self.compute.operations_of(machine.zone, machine.id) if went_down else ())

    def _deleted_job(self, name: str, error: GoneError) -> Job:
        """Return a job whose VM no longer exists, or not yet.

        Raises GoneError; LaunchError: its record can't be read.
        """
        zone, number = parse_job_name(name)
        machine = self._seen.get(number)
        base = job_of(machine) if machine else self._created.get(number)
        folder = self._folder_of(request.run_folder(base.request) if base else None)
        if folder and (record := read_record(folder, number)):
            return with_record(base or unseen_job(name, record.name, record.started or 0.0), record)
        operations = self.compute.operations_of(zone, number)
        creation = creation_of(operations)
        if creation and creation.group:
            group = self.compute.operations_of_group(zone, creation.group)
            operations = (
                *(operation for operation in group if operation.refusal and operation not in operations),
                *operations,
            )
        job = job_of_deleted_vm(base, name, operations, time_limit_of(machine) if machine else None)
        if job is None:
            raise GoneError(f"job {name} does not exist") from error
        return job

    def _record_of(self, machine: VmInstance) -> Record | None:
        """Return the record of how a VM's job ended. None: it has not ended.

        It is the VM's own record, or that of another node whose container never started, because the job can't run
        without it. Raises LaunchError: it can't be read.
        """
        folder = self._folder_of(machine.parameters.get("run_folder")) if machine.trains else None
        if folder is None:
            return None
        own, names = read_record(folder, machine.id), nodes_of(machine)
        if own is not None or len(names) == 1:
            return own
        peers = [record for record in read_records(folder).values() if record.name in names and record.reason]
        return next((record for record in peers if (record.ended or 0.0) >= machine.created), None)

    def _folder_of(self, url: Any) -> Storage | None:
        """Return the run folder; None: unknown, or the run has none."""
        if self._folder is not None or not url:
            return self._folder
        with self._lock:
            if str(url) not in self._folders:
                self._folders[str(url)] = open_folder(str(url)).within(FOLDER_SECONDS)
            return self._folders[str(url)]

    # --- Its end ------------------------------------------------------------------------------------------------------

    def _note_cancelled(self, machine: VmInstance) -> None:
        """Record that the user cancelled the job, to distinguish it from a VM that was deleted by other means.

        A failure does not stop the cancellation.
        """
        record = Record(
            exit=Exit.PREEMPTED,
            reason="cancelled",
            name=machine.name,
            zone=machine.zone,
            started=machine.started,
            cancelled=True,
        )
        try:
            if folder := self._folder_of(machine.parameters.get("run_folder")):
                create_record(folder, machine.id, record)
        except LaunchError as error:
            self._notice(f"could not record the cancellation of {machine.name}: {error.problem}")

    def _vms_of_job(self, machine: VmInstance) -> tuple[VmInstance, ...]:
        if not machine.trains or len(nodes_of(machine)) == 1:
            return (machine,)
        return vms_of_job(machine, self.compute.instances(f'labels.{RUN_LABEL}="{machine.run}"').machines)

    def _remaining_vms(self, job: Job) -> tuple[VmInstance, ...]:
        if not job.zone or not job.run:
            return ()
        return remaining_vms(job, self.compute.instances(f'labels.{RUN_LABEL}="{job.run}"').machines)

    def _delete(self, machine: VmInstance) -> None:
        """Begin to delete a VM, unless it is deleted or being deleted."""
        try:
            with suppress(GoneError):
                self.compute.delete(machine)
        except LaunchError as error:
            if status_of(error) not in (400, 409, 412):
                raise
            with suppress(GoneError):
                if self.compute.instance(machine.zone, machine.id).status in WAITING | RUNNING | DOWN:
                    raise

    def _report_reason(self, machine: VmInstance) -> None:
        """Report why the VM could not delete itself: as it recorded, or because it was stopped."""
        with suppress(LaunchError):
            record = self._record_of(machine)
            if record is None and machine.status in DOWN:
                self._notice(f"{machine.name} is stopped but not deleted; deleting it")
            if record and record.cleanup:
                self._notice(f"{machine.name} could not delete itself; deleting it ({record.cleanup})")


def parse_job_name(name: str) -> tuple[str, str]:
    """Return the zone and the number in a VM job's name. Raises LaunchError."""
    if match := NAME.fullmatch(name):
        return match["zone"], match["number"]
    raise LaunchError(f"invalid name of a VM job: {name}", "Expected projects/PROJECT/zones/ZONE/instances/NUMBER")


def errors_in(places: Iterable[str], unread: Mapping[str, Any]) -> dict[str, LaunchError]:
    """Return, for each of the `places` (zones or regions), an error of a zone there, if there is one."""
    errors: dict[str, LaunchError] = {}
    for place in places:
        inside = (error for zone, error in unread.items() if zone == place or zone.rpartition("-")[0] == place)
        if error := next(inside, None):
            errors[place] = error
    return errors


def still_exists_error(remaining: Iterable[VmInstance]) -> LaunchError:
    """Return the error for VMs that were not deleted in time, with the commands that delete them."""
    machines = list(remaining)
    names = ", ".join(machine.name for machine in machines)
    commands = (
        f"gcloud compute instances delete {machine.name} --zone={machine.zone} --project={machine.project}"
        for machine in machines
    )
    verb = "still exists and is" if len(machines) == 1 else "still exist and are"
    problem = f"{names} {verb} billed, {RELEASE_SECONDS / 60:.0f} minutes after the job's end"
    return LaunchError(problem, "\n".join(commands))
