"""Refuse to mix two computations under one run id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from msgspec import Struct

from launcher.errors import UsageError
from launcher.jobs.job import GONE, IDENTITY_LABEL
from launcher.plan.model import Attempt, Plan
from launcher.runs.attempts import AttemptFacts
from launcher.runs.ledger import Ledger
from launcher.runs.snapshot import RunSnapshot
from launcher.services.request import differences, gpu, labels


class AllowedChange(Struct, frozen=True, kw_only=True):
    """The identity of a run's newest job, from which a resume differs by its machine, or by settings that change no
    past step.

    `lines` are these differences, as in `request.differences`, and those of machine type and place.
    """

    identity: str
    lines: tuple[str, ...]


def check_identity(plan: Plan, snapshot: RunSnapshot, ledger: Ledger, allowed: AllowedChange | None = None) -> None:
    """Check that the run's newest attempt and its active jobs have the plan's identity: only such jobs are followed or
    cancelled. Attempts before that may have another one, if a resume has changed settings (`allowed`); a job that no
    attempt names may not.

    Raises UsageError, with the differences.
    """
    mine = identity_of(plan.attempts[0])
    for job in snapshot.jobs:
        if not mine and job.zone and IDENTITY_LABEL in job.labels:
            problem = f"the VM {job.run} in {job.zone} is a training job, not a workstation"
            raise UsageError(problem, "Choose another name: --name NAME")
    if not mine:
        return
    others = [job for job in snapshot.jobs if job.state != GONE and job.labels.get(IDENTITY_LABEL) != mine]
    older = any(entry.identity not in ("", mine) for entry in snapshot.entries)
    recorded = {entry.job for entry in snapshot.entries}
    foreign = next((job for job in others if not job.is_over or job.name not in recorded), None)
    of_jobs = (job.labels.get(IDENTITY_LABEL) for job in snapshot.jobs if job.state != GONE)
    newest = (snapshot.newest and snapshot.newest.identity) or next(of_jobs, None)
    is_newest = newest in {mine, *([allowed.identity] if allowed else [])}
    if foreign is None and (is_newest or not (others or older)):
        return
    if others:
        is_active = allowed is not None and foreign is not None and not foreign.is_over
        raise other_run(plan, (foreign or others[0]).request, is_active=is_active)
    stored = ledger.stored()
    raise other_run(plan, stored.plan.attempts[0].request if stored and stored.plan.attempts else {})


def comparable_request(plan: Plan, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the plan's request for the kind of GPU of another request; else its first."""
    planned = [attempt.request for attempt in plan.attempts]
    return next((own for own in planned if gpu(own) == gpu(request)), planned[0])


def other_run(plan: Plan, request: Mapping[str, Any], *, is_active: bool = False) -> UsageError:
    """Return the error of a run id that belongs to another computation, with the differences to its `request`.

    `is_active`: its job still runs, and could be resumed with the plan's settings afterwards.
    """
    lines = differences(request, comparable_request(plan, request)) if request else ()
    text = "\n".join(f"  {line}" for line in lines) or "  different code, requirements or user"
    if is_active:
        return UsageError(
            f"run {plan.run} is still running, with other settings (its → this):\n{text}",
            f"Resume it with these when it has ended, or end it: launch cancel {plan.run}",
        )
    return UsageError(
        f"run {plan.run} has another spec or code (its → this):\n{text}",
        "For a separate run, remove --run-id and --resume; --new takes the next number.",
    )


def identity_of(attempt: Attempt) -> str:
    """Return the hash of what an attempt computes and for whom."""
    return labels(attempt.request).get(IDENTITY_LABEL, "")


def facts_of(attempt: Attempt, in_round: int) -> AttemptFacts:
    return AttemptFacts(
        round=in_round,
        region=attempt.region,
        zone=attempt.zone,
        provisioning=attempt.provisioning,
        machine=attempt.machine_type,
        identity=identity_of(attempt),
        spec=labels(attempt.request).get("launch-spec", ""),
    )


def request_id(run: str, where: str, number: int, plan_digest: str, writer: str = "") -> str:
    """Return the UUID of an attempt's create request. The service uses it to recognise a repeated request, and it
    records in the VM's operation which plan the VM was created from. Without a lock another launch may use the same
    number; then `writer` makes the id unique."""
    return str(uuid5(NAMESPACE_URL, "/".join(filter(None, (run, where, str(number), plan_digest, writer)))))
