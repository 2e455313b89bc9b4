"""Check a project for a plan, or for launch's defaults, and drop the placements that cannot work. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from launcher.errors import LaunchError, NoCapacity, NotAuthorised, PlanRefused
from launcher.gcp.api import Rest
from launcher.gcp.parallel import together
from launcher.inputs.gather import GatherOptions, gather
from launcher.inputs.gcloud_config import account
from launcher.inputs.planning import planned
from launcher.plan.model import Attempt, Plan
from launcher.project.checks import credentials, evaluate
from launcher.project.model import Check, Needs, by_severity
from launcher.project.needs import needs_of, project_needs
from launcher.project.reads import read
from launcher.project.report import lines
from launcher.project.vm_checks import check_vms
from launcher.services.compute.capacity import order_by_capacity
from launcher.services.compute.client import Compute
from launcher.spec.reader import Override

ACCESS: Final = {"permissions", "actAs", "access", "job access", "secret"}
"""Checks whose failures are missing permissions."""

# --- Just before anything is sent -------------------------------------------------------------------------------------


def preflight(
    plan: Plan,
    environ: Mapping[str, str],
    compute: Compute,
    say: Callable[[str], None],
    on_checks: Callable[[tuple[Check, ...]], None],
    *,
    creates_repository: bool = False,
) -> Plan:
    """Return the plan without the placements that cannot work; for VMs, the zones in the order of their Spot capacity.

    `on_checks` gets all results if any placement is left.

    Raises:
        PlanRefused: no placement is left; the error lists every problem with its fix.
        NoCapacity: no placement is left, for lack of quota.
        NotAuthorised: no placement is left, for lack of permissions.
    """
    checks = check_plan(plan, environ, compute, creates_repository=creates_repository)
    attempts = allowed(plan, checks)
    if not attempts:
        raise refusal(checks)
    on_checks(checks)
    ends = {check.provisioning: check.ends for check in checks if check.ends}
    attempts = tuple(replace(attempt, ends=ends.get(attempt.provisioning, attempt.ends)) for attempt in attempts)
    plan = replace(plan, attempts=attempts)
    if plan.target == "vm":
        plan, advice = order_by_capacity(plan, compute)
        for line in advice:
            say(line)
    return plan


def check_plan(
    plan: Plan, environ: Mapping[str, str], compute: Compute, *, creates_repository: bool = False
) -> tuple[Check, ...]:
    """Return the results of all checks of a plan, failures first: of its project, and of its VMs.

    Changes nothing; what can't be read is unknown.
    """
    needs = needs_of(plan, creates_repository=creates_repository)
    reads: dict[str, Callable[[], Any]] = {"project": partial(read, Rest(plan.project, environ), needs, environ)}
    if plan.target == "vm":
        reads["vms"] = partial(check_vms, compute, plan)
    answers: dict[str, Any] = together(reads)
    for answer in answers.values():
        if isinstance(answer, LaunchError):
            raise answer
    return by_severity([*evaluate(needs, answers["project"]), *answers.get("vms", ())])


def allowed(plan: Plan, checks: Sequence[Check]) -> tuple[Attempt, ...]:
    """Return the attempts that no failed check is about."""
    failed = [check for check in checks if check.status == "failed"]
    return tuple(attempt for attempt in plan.attempts if not any(check.applies_to(attempt) for check in failed))


def refusal(checks: Sequence[Check]) -> LaunchError:
    """Return the error of a plan without an allowed attempt: every failure, each with its fix."""
    failed = [check for check in checks if check.status == "failed"]
    names = {check.name for check in failed}
    kind = NoCapacity if names == {"quota"} else NotAuthorised if names <= ACCESS else PlanRefused
    problem = "\n".join(["preflight: the job can't run, and was not submitted", *lines(failed)])
    return kind(problem, "To submit it anyway, add --no-preflight.")


# --- launch doctor ----------------------------------------------------------------------------------------------------


def check_project(
    project: str, regions: tuple[str, ...], environ: Mapping[str, str], *, vms: bool = False
) -> tuple[Check, ...]:
    """Return the result of every check of a project with launch's defaults: its bucket and repository; for Vertex AI
    its quotas, for VMs what the default VM needs."""
    needs = project_needs(project, regions)
    if not vms:
        return check_needs(needs, environ)
    plan = planned(gather("vm", None, [Override("regions", list(regions), "--region")], GatherOptions(training=False)))
    return check_needs(replace(needs_of(plan), bucket=needs.bucket, repository=needs.repository), environ, plan)


def check_needs(needs: Needs, environ: Mapping[str, str], vms: Plan | None = None) -> tuple[Check, ...]:
    """Return the results, the credentials' first; those of the VMs too if their plan is given. Nothing else is reported
    if no credentials are accepted."""
    answers = read(Rest(needs.project, environ), needs, environ)
    login = credentials(account(environ), answers)
    if login.status != "ok":
        return (login,)
    checks = [*evaluate(needs, answers)]
    if vms:
        fits = Check("vm", "ok", "network, firewall, quota, machine type and boot image fit")
        checks += check_vms(Compute(needs.project, environ), vms) or [fits]
    return (login, *by_severity(checks))
