"""Whose run it is: a run id belongs to one computation, and every attempt says to which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from launcher.backend.request import differences, labels, machine_type, provisioning
from launcher.errors import UsageError
from launcher.jobs.job import GONE, IDENTITY_LABEL, Job
from launcher.plan.model import Attempt, Plan
from launcher.runs.ledger import Facts, Ledger
from launcher.runs.snapshot import RunSnapshot


def check_identity(plan: Plan, snapshot: RunSnapshot, ledger: Ledger) -> None:
    """Whether all that is there of the run computes what the plan does. Raises UsageError, with what differs: a job
    that isn't this run's for sure is neither followed nor cancelled."""
    mine = identity_of(plan.attempts[0])
    for job in snapshot.jobs:
        if not mine and job.zone and IDENTITY_LABEL in job.labels:
            raise UsageError(f"{job.run} in {job.zone} is a VM that trains", "For one to work on: another --name")
        if mine and job.state != GONE and job.labels.get(IDENTITY_LABEL) != mine:
            raise other_run(plan, job.request)
    if mine and any(entry.identity not in ("", mine) for entry in snapshot.entries):
        stored = ledger.stored()
        raise other_run(plan, stored.plan.attempts[0].request if stored and stored.plan.attempts else {})


def other_run(plan: Plan, request: Mapping[str, Any]) -> UsageError:
    """A run id that belongs to something else."""
    lines = differences(request, plan.attempts[0].request) if request else ()
    what = "\n".join(f"  {line}" for line in lines) or "  the code, the requirements or who launches it differ"
    return UsageError(
        f"run {plan.run} is another one, in which (its → this):\n{what}",
        "Without --run-id and --resume it is a run of its own; --new takes the next number.",
    )


def identity_of(attempt: Attempt) -> str:
    """What is computed and for whom, as a hash."""
    return labels(attempt.request).get(IDENTITY_LABEL, "")


def facts_of(attempt: Attempt, number: int, in_round: int) -> Facts:
    """What its lock says of an attempt."""
    return Facts(
        number=number,
        round=in_round,
        region=attempt.region,
        zone=attempt.zone,
        provisioning=attempt.provisioning,
        machine=attempt.machine_type,
        identity=identity_of(attempt),
        spec=labels(attempt.request).get("launch-spec", ""),
    )


def facts_of_job(job: Job, number: int, in_round: int) -> Facts:
    """What the lock says of an attempt whose job is there already."""
    return Facts(
        number=number,
        round=in_round,
        region=job.region,
        zone=job.zone,
        provisioning=provisioning(job.request),
        machine=machine_type(job.request),
        identity=job.labels.get(IDENTITY_LABEL, ""),
    )


def request_id(run: str, where: str, number: int, plan_digest: str, writer: str = "") -> str:
    """Return the attempt's UUID. By it the service recognises a repeated request, and the VM's operation shows from
    which plan the VM was created. Without a lock another launch may use the same number: then `writer` makes the id
    unique."""
    return str(uuid5(NAMESPACE_URL, "/".join(filter(None, (run, where, str(number), plan_digest, writer)))))
