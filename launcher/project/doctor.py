"""Check this machine, and a project for Vertex AI or VMs. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launcher.inputs.gcloud_config import account

if TYPE_CHECKING:
    from launcher.plan.model import Plan
    from launcher.project.model import Check, Needs


def check_project(
    project: str, regions: tuple[str, ...], environ: Mapping[str, str], *, vms: bool = False
) -> tuple[Check, ...]:
    """Return the result of every check of a project with launch's defaults: its bucket and repository; for Vertex AI
    its quotas, for VMs what the default VM needs."""
    from launcher.project.needs import project_needs

    needs = project_needs(project, regions)
    if not vms:
        return check_needs(needs, environ)
    from launcher.inputs.gather import GatherOptions, gather
    from launcher.inputs.planning import planned
    from launcher.project.needs import needs_of
    from launcher.spec.reader import Override

    plan = planned(gather("vm", None, [Override("regions", list(regions), "--region")], GatherOptions(training=False)))
    return check_vms(plan, replace(needs_of(plan), bucket=needs.bucket, repository=needs.repository), environ)


def check_vms(plan: Plan, needs: Needs, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Return the results for VMs, the credentials' first."""
    from launcher.project.model import ORDER, Check
    from launcher.project.plan_preflight import as_check
    from launcher.services.compute.client import Compute
    from launcher.services.compute.preflight import check

    who, *found = check_needs(needs, environ)
    if who.status != "ok":
        return (who,)
    fits = Check(name="vm", status="ok", text="network, firewall, quota, machine type and boot image fit")
    about_vms = [as_check(one) for one in check(Compute(plan.project, environ), plan)] or [fits]
    return (who, *sorted([*found, *about_vms], key=lambda one: ORDER.index(one.status)))


def check_needs(needs: Needs, environ: Mapping[str, str]) -> tuple[Check, ...]:
    """Return the results, the credentials' first. Nothing else is reported if no credentials are accepted."""
    from launcher.gcp.rest import Rest
    from launcher.project.checks import credentials, evaluate
    from launcher.project.reads import read

    found = read(Rest(needs.project, environ), needs, environ)
    who = credentials(account(environ), found)
    return (who, *evaluate(needs, found)) if who.status == "ok" else (who,)
