"""The VM, or the VMs, of one attempt made: by one request, and whoever repeats it makes no second one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from launcher.backend.base import CreateRefused, GoneError
from launcher.compute.client import Compute
from launcher.compute.end_record import Record
from launcher.compute.operations import Operation
from launcher.diagnosis import Refusal
from launcher.errors import LaunchError
from launcher.gcp.api import UnreachableError
from launcher.jobs.job import RUN_LABEL, Job
from launcher.jobs.vm import DOWN, Machine
from launcher.plan.model import Attempt

APPEAR_SECONDS: Final = 30.0
"""Within which the first VM of several is there, or the request has failed."""
LOOK_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 5.0
"""Between the times of an operation and of the VM that it makes, both Google's: an older one is an attempt's before."""
TAKEN: Final = frozenset({"alreadyExists", "RESOURCE_ALREADY_EXISTS"})
AGAIN_SECONDS: Final = 15.0
"""Until a VM that goes away has gone, most likely."""


class VmCreator:
    """Makes VMs. `record_of` tells how a VM of a run has ended, if it has."""

    def __init__(self, compute: Compute, record_of: Callable[[Machine], Record | None]) -> None:
        self._compute = compute
        self._record_of = record_of

    def make(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """The job that a request has begun. Raises CreateRefused, UnreachableError, LaunchError: see Vms.create."""
        zone = attempt.zone
        if zone is None:
            raise LaunchError("an attempt on Compute Engine needs a zone")
        several = "instanceProperties" in body
        send = self._compute.bulk_insert if several else self._compute.insert
        try:
            operation = checked(send(zone, body, request_id))
            return self._first(operation, attempt, body) if several else of_insert(operation, attempt, body)
        except CreateRefused as error:
            if error.refusal.reason not in TAKEN:
                raise
            raise self._of_taken(error, zone, body) from error

    def _first(self, operation: Operation, attempt: Attempt, body: Mapping[str, Any]) -> Job:
        """The job of several VMs, once the first of them is there: their operation names none of them."""
        name, until = first_of(body), self._compute.clock.now() + APPEAR_SECONDS
        while True:
            with suppress(GoneError):
                machine = self._compute.instance(operation.zone, name)
                mine = machine.run == labels_of(body).get(RUN_LABEL)
                if mine and machine.created >= operation.inserted - SLACK_SECONDS:
                    return pending(machine.resource, machine.created, attempt, body)
            if self._compute.clock.now() >= until:
                raise UnreachableError(f"Compute Engine has begun to make {name}, and doesn't show it")
            self._compute.clock.sleep(LOOK_SECONDS)
            if not operation.done:
                operation = checked(self._compute.operation(operation.zone, operation.name))

    def _of_taken(self, error: CreateRefused, zone: str, body: Mapping[str, Any]) -> LaunchError:
        """What it means that a name is taken: by an attempt before, which is on its way out; by this run's VM, which
        nobody had seen; or by somebody else's, which isn't touched."""
        name = first_of(body)
        try:
            there = self._compute.instance(zone, name)
        except GoneError:
            return passing(f"{name} was still there a moment ago", error)
        run = labels_of(body).get(RUN_LABEL)
        if not run or there.run != run:
            return error
        if there.trains and there.status in DOWN:
            with suppress(GoneError):
                self._compute.delete(there)
            return passing(f"{name} of an attempt before is being deleted", error)
        if there.status not in ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING") or self._ended(there):
            return passing(f"{name} of an attempt before is on its way out", error)
        return UnreachableError(f"there is a VM {name} of this run already")

    def _ended(self, machine: Machine) -> bool:
        """Whether its container has ended; no, if that can't be read."""
        try:
            return machine.trains and self._record_of(machine) is not None
        except LaunchError:
            return False


def checked(operation: Operation) -> Operation:
    """An operation that hasn't failed. Raises CreateRefused."""
    if operation.failed:
        raise CreateRefused(f"Compute Engine: {operation.refusal.message}", operation.refusal)
    return operation


def of_insert(operation: Operation, attempt: Attempt, body: Mapping[str, Any]) -> Job:
    """The job of one VM. Raises UnreachableError: the answer is about something else."""
    if not operation.target or operation.target_name not in ("", body.get("name")):
        raise UnreachableError(f"Compute Engine answered about another VM: {operation.target_name!r}")
    project = operation.project
    name = f"projects/{project}/zones/{attempt.zone}/instances/{operation.target}"
    return pending(name, operation.inserted, attempt, body)


def pending(name: str, created: float, attempt: Attempt, body: Mapping[str, Any]) -> Job:
    """A job that waits for its machines."""
    return Job(name=name, region=attempt.region, state="PENDING", created=created, labels=labels_of(body), request=body)


def labels_of(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Of the VM, or of all of them."""
    found: Mapping[str, str] = body.get("instanceProperties", body).get("labels", {})
    return found


def first_of(body: Mapping[str, Any]) -> str:
    """The name of the VM, or of node 0."""
    names = [str(name) for name in body.get("perInstanceProperties", {})]
    return next((name for name in names if name.endswith("-n0")), str(body.get("name", "")))


def passing(problem: str, error: CreateRefused) -> CreateRefused:
    """A refusal that the same request won't meet in a moment."""
    refusal = Refusal(code=503, message=problem, service="compute", retry_after=AGAIN_SECONDS)
    return CreateRefused(f"{error.problem}: {problem}", refusal)
