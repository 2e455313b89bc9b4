"""Run the preflight checks of a plan: of its project, and of its VMs. Order the zones by Spot capacity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from launcher.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.plan.model import Plan
    from launcher.project.model import Check, Needs
    from launcher.services.compute.client import Compute
    from launcher.services.compute.preflight_checks import VmFinding

OnChecks = Callable[[tuple["Check", ...]], None]


def vertex_preflight(
    plan: Plan, environ: Mapping[str, str], on_checks: OnChecks, *, creates_repository: bool = False
) -> Plan:
    """Return the plan without the placements that cannot work. `on_checks` gets all results if any placement is left.

    Raises:
        PlanRefused: no placement is left; the error lists every problem with its fix.
        NoCapacity: no placement is left, for lack of quota.
        NotAuthorised: no placement is left, for lack of permissions.
    """
    from launcher.project.preflight import check

    return without_failed(plan, check(plan, environ, creates_repository=creates_repository), on_checks)


def vm_preflight(
    plan: Plan, compute: Compute, say: Callable[[str], None], on_checks: OnChecks, *, creates_repository: bool = False
) -> Plan:
    """Return the plan without the placements that cannot work, the zones in the order of their Spot capacity.

    Raises as `vertex_preflight` does.
    """
    from launcher.project.needs import needs_of
    from launcher.services.compute.spot_capacity import order_by_capacity

    checks = vm_checks(plan, needs_of(plan, creates_repository=creates_repository), compute)
    plan, lines = order_by_capacity(without_failed(plan, checks, on_checks), compute)
    for line in lines:
        say(line)
    return plan


def without_failed(plan: Plan, checks: tuple[Check, ...], on_checks: OnChecks) -> Plan:
    """Return the plan without the placements that a failed check is about. Raises LaunchError: none is left."""
    from launcher.project.preflight import allowed, refusal

    attempts = allowed(plan, checks)
    if not attempts:
        raise refusal(checks)
    on_checks(checks)
    ends = {check.provisioning: check.ends for check in checks if check.ends}
    attempts = tuple(replace(attempt, ends=ends.get(attempt.provisioning, attempt.ends)) for attempt in attempts)
    return replace(plan, attempts=attempts)


def vm_checks(plan: Plan, needs: Needs, compute: Compute) -> tuple[Check, ...]:
    """Return the results of all checks of VMs, failures first: those of the project, and those of network, firewall,
    quota, machine type and boot image."""
    from launcher.gcp.parallel import together
    from launcher.gcp.rest import Rest
    from launcher.project.checks import evaluate
    from launcher.project.model import ORDER
    from launcher.project.reads import read
    from launcher.services.compute.preflight import check

    calls: dict[str, Callable[[], Any]] = {
        "vms": partial(check, compute, plan),
        "project": partial(read, Rest(plan.project, compute.environ), needs, compute.environ),
    }
    answers: dict[str, Any] = together(calls)
    for one in answers.values():
        if isinstance(one, LaunchError):
            raise one
    found = [*evaluate(needs, answers["project"]), *map(as_check, answers["vms"])]
    return tuple(sorted(found, key=lambda one: ORDER.index(one.status)))


def as_check(finding: VmFinding) -> Check:
    """Return a finding about VMs as a check."""
    from launcher.project.model import Check

    is_unread = finding.problem.startswith("not checked: ")
    return Check(
        name="quota" if "quota" in finding.problem.lower() and not is_unread else "vm",
        status="failed" if finding.scope == "refusal" else "unknown" if is_unread else "warning",
        text=finding.problem,
        fix=finding.fix,
        place=finding.place,
        provisioning=finding.provisioning,
        quotas=finding.quotas,
    )
