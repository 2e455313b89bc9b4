"""Create the VMs of one attempt with one request, which may be repeated without creating more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from launcher.diagnosis import Refusal
from launcher.errors import LaunchError, UnreachableError
from launcher.jobs.job import RUN_LABEL, Job
from launcher.jobs.vm import DOWN, VmInstance
from launcher.plan.model import Attempt
from launcher.services.base import CreateRefused, GoneError
from launcher.services.compute.client import Compute, Operation
from launcher.services.compute.job_state import Record

APPEAR_SECONDS: Final = 30.0
"""Time in which the first of several VMs must appear."""
POLL_SECONDS: Final = 1.0
SLACK_SECONDS: Final = 5.0
"""Tolerance between the times of an operation and of the VM it creates. An older VM is a previous attempt's."""
NAME_TAKEN: Final = frozenset({"alreadyExists", "RESOURCE_ALREADY_EXISTS"})
RETRY_SECONDS: Final = 15.0
"""Seconds after which a VM that is being deleted is usually gone."""


RecordOf = Callable[[VmInstance], Record | None]
"""Return the record of how a VM's job ended, or None."""


def create_vms(
    compute: Compute, record_of: RecordOf, attempt: Attempt, body: Mapping[str, Any], request_id: str
) -> Job:
    """Send the create request and return its job. Raises as `Vms.create` does."""
    zone = attempt.zone
    if zone is None:
        raise LaunchError("an attempt on Compute Engine needs a zone")
    is_bulk = "instanceProperties" in body
    send = compute.bulk_insert if is_bulk else compute.insert
    try:
        operation = send(zone, body, request_id).require_success()
        if is_bulk:
            return wait_for_head(compute, operation, attempt, body)
    except CreateRefused as error:
        if error.refusal.reason not in NAME_TAKEN:
            raise
        raise explain_name_taken(compute, record_of, error, zone, body) from error
    if not operation.target or operation.target_name not in ("", body.get("name")):
        raise UnreachableError(f"Compute Engine answered about another VM: {operation.target_name!r}")
    name = f"projects/{operation.project}/zones/{zone}/instances/{operation.target}"
    return pending_job(name, operation.inserted, attempt, body)


def wait_for_head(compute: Compute, operation: Operation, attempt: Attempt, body: Mapping[str, Any]) -> Job:
    """Return the job of several VMs once node 0 exists: the operation of a bulkInsert names no VM."""
    name, until = head_name(body), compute.clock.now() + APPEAR_SECONDS
    while True:
        with suppress(GoneError):
            machine = compute.instance(operation.zone, name)
            is_mine = machine.run == request_labels(body).get(RUN_LABEL)
            if is_mine and machine.created >= operation.inserted - SLACK_SECONDS:
                return pending_job(machine.resource, machine.created, attempt, body)
        if compute.clock.now() >= until:
            raise UnreachableError(f"Compute Engine accepted the request for {name}, but the VM has not appeared")
        compute.clock.sleep(POLL_SECONDS)
        if not operation.done:
            operation = compute.operation(operation.zone, operation.name).require_success()


def explain_name_taken(
    compute: Compute, record_of: RecordOf, error: CreateRefused, zone: str, body: Mapping[str, Any]
) -> LaunchError:
    """Return the error for a name that is in use.

    It is transient if a previous attempt's VM is being deleted, and UnreachableError if this run's VM already exists.
    If the VM is another run's, which is not touched, it is the refusal itself.
    """
    name = head_name(body)
    try:
        machine = compute.instance(zone, name)
    except GoneError:
        return transient_refusal(f"{name} was deleted a moment ago", error)
    run = request_labels(body).get(RUN_LABEL)
    if not run or machine.run != run:
        return error
    if machine.trains and machine.status in DOWN:
        with suppress(GoneError):
            compute.delete(machine)
        return transient_refusal(f"{name} of the previous attempt is being deleted", error)
    has_ended = False
    with suppress(LaunchError):  # the record can't be read
        has_ended = machine.trains and record_of(machine) is not None
    if has_ended or machine.status not in ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING"):
        return transient_refusal(f"{name} of the previous attempt is shutting down", error)
    return UnreachableError(f"VM {name} of this run already exists")


def pending_job(name: str, created: float, attempt: Attempt, body: Mapping[str, Any]) -> Job:
    return Job(
        name=name, region=attempt.region, state="PENDING", created=created, labels=request_labels(body), request=body
    )


def request_labels(body: Mapping[str, Any]) -> Mapping[str, str]:
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
