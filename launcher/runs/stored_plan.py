"""Check a plan read from a run folder: others can write there, so it is submitted only if Google vouches for it.

Google's own records of the run's jobs name the plan that each was created from: a label of the CustomJob, which nobody
can change, or the request id in the operation that created the VM. docs/security.md says why these two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.errors import NotAuthorised
from launcher.jobs.job import PLAN_LABEL, Job
from launcher.plan.binding import Stored
from launcher.plan.model import Plan
from launcher.runs.attempts import AttemptEntry
from launcher.runs.identity_check import request_id
from launcher.runs.ledger import Ledger
from launcher.services import request
from launcher.services.base import Service


def refusal(stored: Stored, jobs: Sequence[Job], ledger: Ledger, service: Service) -> NotAuthorised | None:
    """Return an error if the plan must not be submitted; None: one of the run's `jobs` (newest first) was created from
    it.

    Raises LaunchError: the run's attempts or operations can't be read.
    """
    if is_bound(stored, jobs, ledger.entries(), service):
        return None
    plan = stored.plan
    job = jobs[0]
    hint = f"{job.command} --resume {job.run or plan.run} continues the run with your own spec"
    file = f"{request.run_folder(job.request) or plan.run_folder}/plan.json"
    if not job.zone and not any(PLAN_LABEL in one.labels for one in jobs):
        return NotAuthorised(
            f"{file} can't be verified, so none of its attempts is submitted:\n"
            f"the run's jobs have no label {PLAN_LABEL}; an older launch created them",
            hint,
        )
    lines = "".join(f"\n  {line}" for line in differences(plan, job, service.project))
    unknown = "\n  (nothing that the job's record shows)"
    if job.zone:
        unknown = (
            "\n  (unknown: the VMs may be older than two weeks,\n  or created by another account or an older launch)"
        )
    return NotAuthorised(
        f"{file} is not the plan that the run's jobs were created from,\n"
        f"so none of its attempts is submitted. Differences (job → plan.json):{lines or unknown}",
        hint,
    )


def is_bound(stored: Stored, jobs: Sequence[Job], entries: Sequence[AttemptEntry], service: Service) -> bool:
    """Return whether a job of the run was created from exactly this plan.

    A CustomJob must also request the same as each attempt: someone who may create jobs could copy the label, but not
    act as a service account that they have no rights to. Nothing else vouches for a VM, so the follower's own account
    must have created it.
    """
    plan, mark = stored.plan, stored.digest
    if plan.target != "vm":
        return not any(attempt.zone for attempt in plan.attempts) and any(
            job.labels.get(PLAN_LABEL) == mark and not job.zone and not any(requested(plan, job)) for job in jobs
        )
    vms = dict.fromkeys(
        [
            *(job.name for job in jobs if job.zone),
            *(entry.job for entry in reversed(entries) if entry.job and entry.zone),
        ]
    )
    return any(
        service.request_ids(name) & {request_id(plan.run, name.split("/")[3], entry.number, mark) for entry in entries}
        for name in vms
    )


def differences(plan: Plan, job: Job, project: str) -> list[str]:
    """Return a line for each field in which the plan differs from a job, as far as the job's record shows it."""
    places = dict.fromkeys(attempt.where for attempt in plan.attempts)
    folder = request.run_folder(job.request)
    known = {
        "project": (project, plan.project),
        "region": (job.place, ", ".join(places) if job.place not in places else job.place),
        "run folder": (folder, plan.run_folder or "(none)"),
    }
    lines = [f"{name}: {old} → {new}" for name, (old, new) in known.items() if old and old != new]
    return [*lines, *dict.fromkeys(requested(plan, job))]


def requested(plan: Plan, job: Job) -> Iterator[str]:
    """Yield what the attempts' requests ask for differently from a job: account, image, command, environment."""
    for attempt in plan.attempts:
        yield from request.differences(job.request, attempt.request, request.submitted)
