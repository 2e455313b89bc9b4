"""Create the VMs of one attempt with one request, which may be repeated without creating more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from launcher.diagnosis import Refusal
from launcher.errors import LaunchError
from launcher.gcp.api import UnreachableError
from launcher.jobs.job import RUN_LABEL, Job
from launcher.jobs.vm import DOWN, VmInstance
from launcher.plan.model import Attempt
from launcher.services.base import CreateRefused, GoneError
from launcher.services.compute.client import Compute
from launcher.services.compute.end_record import Record
from launcher.services.compute.operations import Operation

APPEAR_SECONDS: Final = 30.0
"""Time in which the first of several VMs must appear."""
POLL_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 5.0
"""Tolerance between the times of an operation and of the VM it creates. An older VM is a previous attempt's."""
NAME_TAKEN: Final = frozenset({"alreadyExists", "RESOURCE_ALREADY_EXISTS"})
RETRY_SECONDS: Final = 15.0
"""Seconds after which a VM that is being deleted is usually gone."""


class VmCreator:
    """Create VMs. `record_of` returns the record of how a VM's job ended, or None."""

    def __init__(self, compute: Compute, record_of: Callable[[VmInstance], Record | None]) -> None:
        self._compute = compute
        self._record_of = record_of

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """Send the create request and return its job.

        Raises CreateRefused, UnreachableError, LaunchError: see Vms.create.
        """
        zone = attempt.zone
        if zone is None:
            raise LaunchError("an attempt on Compute Engine needs a zone")
        is_bulk = "instanceProperties" in body
        send = self._compute.bulk_insert if is_bulk else self._compute.insert
        try:
            operation = require_success(send(zone, body, request_id))
            if is_bulk:
                return self._wait_for_head(operation, attempt, body)
            if not operation.target or operation.target_name not in ("", body.get("name")):
                raise UnreachableError(f"Compute Engine answered about another VM: {operation.target_name!r}")
            name = f"projects/{operation.project}/zones/{zone}/instances/{operation.target}"
            return pending_job(name, operation.inserted, attempt, body)
        except CreateRefused as error:
            if error.refusal.reason not in NAME_TAKEN:
                raise
            raise self._explain_name_taken(error, zone, body) from error

    def _wait_for_head(self, operation: Operation, attempt: Attempt, body: Mapping[str, Any]) -> Job:
        """Return the job of several VMs once node 0 exists: the operation of a bulkInsert names no VM."""
        name, until = head_name(body), self._compute.clock.now() + APPEAR_SECONDS
        while True:
            with suppress(GoneError):
                machine = self._compute.instance(operation.zone, name)
                is_mine = machine.run == request_labels(body).get(RUN_LABEL)
                if is_mine and machine.created >= operation.inserted - SLACK_SECONDS:
                    return pending_job(machine.resource, machine.created, attempt, body)
            if self._compute.clock.now() >= until:
                raise UnreachableError(f"Compute Engine accepted the request for {name}, but the VM has not appeared")
            self._compute.clock.sleep(POLL_SECONDS)
            if not operation.done:
                operation = require_success(self._compute.operation(operation.zone, operation.name))

    def _explain_name_taken(self, error: CreateRefused, zone: str, body: Mapping[str, Any]) -> LaunchError:
        """Return the error for a name that is in use.

        It is transient if a previous attempt's VM is being deleted, and UnreachableError if this run's VM already
        exists. If the VM is another run's, which is not touched, it is the refusal itself.
        """
        name = head_name(body)
        try:
            there = self._compute.instance(zone, name)
        except GoneError:
            return transient_refusal(f"{name} was deleted a moment ago", error)
        run = request_labels(body).get(RUN_LABEL)
        if not run or there.run != run:
            return error
        if there.trains and there.status in DOWN:
            with suppress(GoneError):
                self._compute.delete(there)
            return transient_refusal(f"{name} of the previous attempt is being deleted", error)
        if there.status not in ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING") or self._ended(there):
            return transient_refusal(f"{name} of the previous attempt is shutting down", error)
        return UnreachableError(f"VM {name} of this run already exists")

    def _ended(self, machine: VmInstance) -> bool:
        """Return whether a VM's container has ended, or False if that can't be read."""
        try:
            return machine.trains and self._record_of(machine) is not None
        except LaunchError:
            return False


def require_success(operation: Operation) -> Operation:
    """Return an operation unless it has failed. Raises CreateRefused."""
    if operation.failed:
        raise CreateRefused(f"Compute Engine: {operation.refusal.message}", operation.refusal)
    return operation


def pending_job(name: str, created: float, attempt: Attempt, body: Mapping[str, Any]) -> Job:
    """Return a job that waits for its machines."""
    return Job(
        name=name, region=attempt.region, state="PENDING", created=created, labels=request_labels(body), request=body
    )


def request_labels(body: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the labels in a request for one VM or for several."""
    labels: Mapping[str, str] = body.get("instanceProperties", body).get("labels", {})
    return labels


def head_name(body: Mapping[str, Any]) -> str:
    """Return the name of the VM, or of node 0 of several."""
    names = [str(name) for name in body.get("perInstanceProperties", {})]
    return next((name for name in names if name.endswith("-n0")), str(body.get("name", "")))


def transient_refusal(problem: str, error: CreateRefused) -> CreateRefused:
    """Return a refusal after which the same request may succeed in a moment."""
    refusal = Refusal(code=503, message=problem, service="compute", retry_after=RETRY_SECONDS)
    return CreateRefused(f"{error.problem}: {problem}", refusal)
