"""VMs that train, as jobs: the Service of Compute Engine.

A run's job is its VM, or of several the first one; which VMs belong together, their own metadata says. A VM is known
by its number, as its name may be another's by now; whatever is deleted here is deleted by number.
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
from launcher.backend import request
from launcher.backend.base import GoneError, Listing
from launcher.clock import REAL, Clock
from launcher.compute import end_record
from launcher.compute.client import SERVICE, Compute
from launcher.compute.create import VmCreator
from launcher.compute.end_record import Record
from launcher.compute.job_state import (
    MAKES,
    ceiling_of,
    gone,
    is_on_its_way,
    job_of,
    making,
    of_record,
    of_records_alone,
)
from launcher.compute.node_set import is_head, left_of, nodes_of, set_of
from launcher.errors import LaunchError
from launcher.gcp.api import UnreachableError, open_session, service_account, status_of
from launcher.gcp.parallel import together
from launcher.gcp.storage import open_folder
from launcher.jobs.job import RUN_LABEL, Job
from launcher.jobs.vm import DOWN, Machine
from launcher.plan.model import Attempt

FOLDER_SECONDS: Final = 20.0
"""For one question to a run folder."""
BY_ITSELF_SECONDS: Final = 30.0
"""A VM whose container has ended deletes itself; after so long it is done for it."""
RELEASE_SECONDS: Final = 180.0
POLL_SECONDS: Final = 2.0
NAME: Final = re.compile(r"projects/[^/]+/zones/(?P<zone>[^/]+)/instances/(?P<number>\d+)")


class Vms:
    """The VMs of one project as jobs. Any number of threads may use it."""

    def __init__(
        self,
        project: str,
        environ: Mapping[str, str],
        clock: Clock = REAL,
        notice: Callable[[str], None] | None = None,
        folder: Storage | None = None,
        account: str = "",
    ) -> None:
        """`notice` is told what whoever waits should know. `folder` is the run folder, where it is all about one run:
        it tells of VMs that are gone. `account` is gcloud's, for credentials that don't say whose they are."""
        self.project = project
        self.clock = clock
        self.compute = Compute(project, environ, clock, notice)
        self._notice = notice or (lambda _line: None)
        self._account = account
        self._folder = folder.within(FOLDER_SECONDS) if folder else None
        self._folders: dict[str, Storage] = {}
        self._seen: dict[str, Machine] = {}
        self._made: dict[str, Job] = {}
        self._lock = threading.Lock()

    def beside(self, folder: Storage | None) -> Vms:
        """The same, for what is all about one run, whose folder tells of VMs that are gone."""
        other = copy(self)
        other._folder = folder.within(FOLDER_SECONDS) if folder else None
        return other

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """The job of the VM, or of the VMs, that a request begins to make. It is PENDING: whether there are machines
        is seen later.

        Raises:
            CreateRefused: for sure nothing was made; also while a previous attempt still holds the name, which passes.
            UnreachableError: whether there is a job now is not known, or there was one already, and it runs.
            LaunchError: the request can't be written down; nothing was sent.
        """
        job = VmCreator(self.compute, self._record_of).make(attempt, body, request_id)
        self._made[job.id] = job
        return job

    def get(self, name: str) -> Job:
        """A job as it is now, or as it ended. Raises GoneError: there is no such VM, and nothing tells how it ended;
        UnreachableError: no answer for a minute."""
        zone, number = place_of(name)
        try:
            machine = self.compute.instance(zone, number)
        except GoneError as error:
            return self._gone(name, error)
        return self._as_it_is(machine)

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """The jobs of all zones that pass a filter. `regions` (zones too) are those that must be readable.

        A filter for any run (labels.launch-run:*) finds what trains; one for a single run its VM to work on too.
        Unless `partly`, raises the first error.
        """
        places = list(dict.fromkeys(regions))
        try:
            fleet = self.compute.instances(filter_)
        except LaunchError as error:
            if not partly:
                raise
            return Listing((), dict.fromkeys(places, error))
        wanted = [one for one in fleet.machines if is_head(one) and (one.trains or ":*" not in filter_)]
        found = together({one.id: partial(self._as_it_is, one) for one in wanted})
        unseen = {one.zone: found[one.id] for one in wanted if isinstance(found[one.id], LaunchError)}
        closed = {zone: UnreachableError(f"Compute Engine: {zone}: {words}") for zone, words in fleet.unread.items()}
        unread = unread_of(places, {**closed, **unseen})
        if unread and not partly:
            raise next(iter(unread.values()))
        return Listing(tuple(job for one in wanted if isinstance(job := found[one.id], Job)), unread)

    def request_ids(self, name: str) -> frozenset[str]:
        """Return the ids of the requests by which the user's own account created a VM, alone or with others.

        They are in its operations, which nobody can change. Empty once Google no longer keeps those, or if the account
        is unknown.
        """
        account = service_account(open_session(SERVICE, self.compute.environ)[0].credentials) or self._account
        if not account:
            return frozenset()
        zone, number = place_of(name)
        made = making(self.compute.operations_of(zone, number))
        if made is None:
            return frozenset()
        together_with = self.compute.operations_of_group(zone, made.group) if made.group else ()
        mine = (one for one in (made, *together_with) if one.kind in MAKES and one.user == account)
        return frozenset(one.request_id for one in mine if one.request_id)

    def cancel(self, name: str) -> None:
        """End a job: note that it was cancelled, and begin to delete its VMs, which get half a minute to save. One
        that has ended is fine. Raises GoneError; UnreachableError: there is no VM to delete yet."""
        zone, number = place_of(name)
        try:
            machine = self.compute.instance(zone, number)
        except GoneError as error:
            if self._gone(name, error).is_over:
                return
            raise UnreachableError(f"{name} is just being made: it can't be cancelled yet", "Try again.") from error
        if machine.trains:
            self._note_cancelled(machine)
        for one in self._set_of(machine):
            self._delete(one)

    def release(self, job: Job) -> None:
        """Delete what an ended job has left, and wait until it is gone; a VM whose container has ended does it by
        itself. The VMs of another attempt, and VMs to work on, are left alone.

        Raises:
            LaunchError: something is there still, and is billed.
        """
        began = self.clock.now()
        deleted: set[str] = set()
        while left := self._left_of(job):
            waited = self.clock.now() - began
            if waited >= RELEASE_SECONDS:
                raise still_there(left)
            for machine in left:
                due = machine.status in DOWN or waited >= BY_ITSELF_SECONDS
                if due and machine.id not in deleted:
                    deleted.add(machine.id)
                    self._tell_why(machine)
                    self._delete(machine)
            self.clock.sleep(POLL_SECONDS)

    # --- A job --------------------------------------------------------------------------------------------------------

    def _as_it_is(self, machine: Machine) -> Job:
        """A VM that is there, as a job."""
        with self._lock:
            self._seen[machine.id] = machine
        try:
            record = self._record_of(machine)
        except LaunchError as error:  # the VM itself tells enough as long as it is there
            self._notice(f"how {machine.name} does can't be read in its run folder: {error.problem}")
            record = None
        went_down = machine.trains and record is None and machine.status in DOWN
        return job_of(machine, record, self.compute.operations_of(machine.zone, machine.id) if went_down else ())

    def _gone(self, name: str, error: GoneError) -> Job:
        """A job whose VM is no more, or doesn't show itself yet. Raises GoneError; LaunchError: its record can't be
        read."""
        zone, number = place_of(name)
        machine = self._seen.get(number)
        base = job_of(machine) if machine else self._made.get(number)
        folder = self._folder_of(request.run_folder(base.request) if base else None)
        if folder and (record := end_record.read(folder, number)):
            return of_record(base or of_records_alone(name, record), record)
        operations = self.compute.operations_of(zone, number)
        made = making(operations)
        if made and made.group:
            together_with = self.compute.operations_of_group(zone, made.group)
            operations = (*(one for one in together_with if one.failed and one not in operations), *operations)
        found = gone(base, name, operations, ceiling_of(machine) if machine else None)
        if found is None:
            raise GoneError(f"there is no job {name}") from error
        return found

    def _record_of(self, machine: Machine) -> Record | None:
        """How the job of a VM has ended: by its own record, or that of one of its peers whose container was never
        started, for which the others would wait. Raises LaunchError: that can't be read."""
        folder = self._folder_of(machine.parameters.get("run_folder")) if machine.trains else None
        if folder is None:
            return None
        own, names = end_record.read(folder, machine.id), nodes_of(machine)
        if own is not None or len(names) == 1:
            return own
        peers = [one for one in end_record.read_all(folder).values() if one.name in names and one.reason]
        return next((one for one in peers if (one.ended or 0.0) >= machine.created), None)

    def _folder_of(self, url: Any) -> Storage | None:
        """The run folder; None: it isn't known, or nobody has one."""
        if self._folder is not None or not url:
            return self._folder
        with self._lock:
            if str(url) not in self._folders:
                self._folders[str(url)] = open_folder(str(url)).within(FOLDER_SECONDS)
            return self._folders[str(url)]

    # --- Its end ------------------------------------------------------------------------------------------------------

    def _note_cancelled(self, machine: Machine) -> None:
        """Without the note it would look as if somebody had deleted the VM: nothing that has to stop us."""
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
                end_record.create(folder, machine.id, record)
        except LaunchError as error:
            self._notice(f"that {machine.name} was cancelled can't be noted: {error.problem}")

    def _set_of(self, machine: Machine) -> tuple[Machine, ...]:
        if not machine.trains or len(nodes_of(machine)) == 1:
            return (machine,)
        return set_of(machine, self.compute.instances(f'labels.{RUN_LABEL}="{machine.run}"').machines)

    def _left_of(self, job: Job) -> tuple[Machine, ...]:
        if not job.zone or not job.run:
            return ()
        return left_of(job, self.compute.instances(f'labels.{RUN_LABEL}="{job.run}"').machines)

    def _delete(self, machine: Machine) -> None:
        """Begin to delete a VM; one that is gone, or going, is fine."""
        try:
            with suppress(GoneError):
                self.compute.delete(machine)
        except LaunchError as error:
            if status_of(error) not in (400, 409, 412):
                raise
            with suppress(GoneError):
                if not is_on_its_way(self.compute.instance(machine.zone, machine.id)):
                    raise

    def _tell_why(self, machine: Machine) -> None:
        """What the VM said of why it could not delete itself; or that it couldn't, as it was stopped."""
        with suppress(LaunchError):
            record = self._record_of(machine)
            if record is None and machine.status in DOWN:
                self._notice(f"{machine.name} is still there, stopped: it is deleted now")
            if record and record.cleanup:
                self._notice(f"{machine.name} could not delete itself, and is deleted now: {record.cleanup}")


def place_of(name: str) -> tuple[str, str]:
    """The zone and the number in a job's name. Raises LaunchError."""
    if found := NAME.fullmatch(name):
        return found["zone"], found["number"]
    raise LaunchError(f"{name} is no VM's name", "projects/PROJECT/zones/ZONE/instances/NUMBER")


def unread_of(places: Iterable[str], unread: Mapping[str, Any]) -> dict[str, LaunchError]:
    """The errors by the places (zones, or whole regions) that somebody needs."""
    found: dict[str, LaunchError] = {}
    for place in places:
        inside = (error for zone, error in unread.items() if zone == place or zone.rpartition("-")[0] == place)
        if error := next(inside, None):
            found[place] = error
    return found


def still_there(left: Iterable[Machine]) -> LaunchError:
    """What could not be removed, and the commands that do."""
    machines = list(left)
    names = ", ".join(machine.name for machine in machines)
    commands = (
        f"gcloud compute instances delete {one.name} --zone={one.zone} --project={one.project}" for one in machines
    )
    verb = "is" if len(machines) == 1 else "are"
    problem = f"{names} {verb} still there {RELEASE_SECONDS / 60:.0f} minutes after the end, and billed"
    return LaunchError(problem, "\n".join(commands))
