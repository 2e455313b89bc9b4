"""Before the first VM is made: what would keep it from being made, or from being of use, found out in ten seconds.

Nothing is changed, and what can't be read stands in nobody's way: it is told in one line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from launcher import catalog
from launcher.backend.request import read
from launcher.backend.request.vm import properties
from launcher.compute.client import Compute
from launcher.compute.messages import as_json
from launcher.compute.preflight_checks import (
    Finding,
    Net,
    Units,
    absent,
    between_nodes,
    has_external_ip,
    net_of,
    no_image,
    no_machine,
    reach,
    short,
    ssh,
)
from launcher.diagnosis import Refusal, Tried, of_refusal
from launcher.errors import LaunchError
from launcher.gcp.api import status_of, words
from launcher.gcp.parallel import glance, together
from launcher.jobs.vm import last
from launcher.plan.model import Attempt, Plan

SECONDS: Final = 8.0
"""For one answer. All are asked for at once."""
PLACES: Final = 12
"""Regions, and zones, that are looked at: those that are tried first."""
EVERYWHERE: Final = "GPUS_ALL_REGIONS"

Answers = Mapping[str, Any]
"""What was asked for, in words -> the answer as JSON, or None where there is no such thing."""


def check(compute: Compute, plan: Plan) -> tuple[Finding, ...]:
    """What is missing for a plan's VMs, refusals first."""
    calls = questions(compute, plan)
    found = together(calls)
    missing = {key for key, answer in found.items() if isinstance(answer, LaunchError) and status_of(answer) == 404}
    unread = {key: each for key, each in found.items() if isinstance(each, LaunchError) and key not in missing}
    answers = {key: None if key in missing else each for key, each in found.items() if key not in unread}
    findings = judged(compute.project, plan, answers)
    told = [unchecked(unread)] if unread else []
    return tuple(sorted(dict.fromkeys([*findings, *told]), key=lambda one: one.scope != "refusal"))


def allowed(plan: Plan, findings: tuple[Finding, ...]) -> tuple[Attempt, ...]:
    """The attempts that nothing speaks against."""
    refusals = [one for one in findings if one.scope == "refusal"]
    return tuple(one for one in plan.attempts if not any(each.holds_for(one) for each in refusals))


def unchecked(unread: Mapping[str, Any]) -> Finding:
    """What could not be read, and the first reason."""
    names = ", ".join(unread)
    problem = words(next(iter(unread.values())).problem)
    return Finding("warning", f"not checked: {names} ({problem})")


# --- Questions --------------------------------------------------------------------------------------------------------


def questions(compute: Compute, plan: Plan) -> dict[str, Callable[[], Any]]:
    """All that is asked, in words, and how."""
    first = properties(plan.attempts[0].request)
    calls: dict[str, Callable[[], Any]] = {"quotas of the project": partial(one, compute, "ProjectsClient", "get")}
    for attempt in firsts(plan, lambda attempt: attempt.region):
        net, region = net_of(first, attempt.region, compute.project), attempt.region
        where = {"project": net.project, "region": region}
        calls[f"quotas of {region}"] = partial(one, compute, "RegionsClient", "get", region=region)
        if not has_external_ip(first) or plan.machine.nodes > 1:
            named = {**where, "subnetwork": net.subnetwork}
            calls[subnetwork(net)] = partial(one, compute, "SubnetworksClient", "get", **named)
        if not has_external_ip(first):
            calls[f"routers of {region}"] = partial(many, compute, "RoutersClient", **where)
    for attempt in firsts(plan, lambda attempt: attempt.zone):
        asked = {"zone": attempt.zone, "machine_type": attempt.machine_type}
        calls[machine(attempt)] = partial(one, compute, "MachineTypesClient", "get", **asked)
    if by_iap(plan) or plan.machine.nodes > 1:
        net = net_of(first, plan.attempts[0].region, compute.project)
        calls["firewall rules"] = partial(many, compute, "FirewallsClient", project=net.project)
    if found := IMAGE.search(source(first)):
        project, family, name = found.groups()
        verb, asked = ("get_from_family", {"family": name}) if family else ("get", {"image": name})
        calls["image"] = partial(one, compute, "ImagesClient", verb, project=project, **asked)
    return calls


def by_iap(plan: Plan) -> bool:
    """Return whether launch ssh reaches the plan's VMs through IAP's tunnel."""
    return plan.image is None and not has_external_ip(properties(plan.attempts[0].request))


IMAGE: Final = re.compile(r"projects/([^/]+)/global/images/(family/)?([^/]+)$")


def source(instance: Mapping[str, Any]) -> str:
    """What it boots."""
    return str(instance["disks"][0].get("initializeParams", {}).get("sourceImage", ""))


def subnetwork(net: Net) -> str:
    """In words."""
    return f"subnetwork {net.subnetwork} of {net.region}"


def machine(attempt: Attempt) -> str:
    """In words."""
    return f"{attempt.machine_type} in {attempt.zone}"


def firsts(plan: Plan, key: Callable[[Attempt], str | None]) -> list[Attempt]:
    """The first attempt in each of the places that are looked at."""
    return list({place: one for one in reversed(plan.attempts) if (place := key(one))}.values())[::-1][:PLACES]


def one(compute: Compute, client: str, verb: str, **asked: Any) -> Any:
    """One answer. Raises LaunchError."""
    return as_json(glance(compute.api(client), verb, SECONDS, **{"project": compute.project, **asked}))


def many(compute: Compute, client: str, **asked: Any) -> Any:
    """The first page of a list, which is more than a project has of these. Raises LaunchError."""
    pager = glance(compute.api(client), "list", SECONDS, **{"project": compute.project, **asked})
    return [as_json(each) for each in next(iter(pager.pages)).items]


# --- Answers ----------------------------------------------------------------------------------------------------------


def judged(project: str, plan: Plan, answers: Answers) -> list[Finding]:
    """What the answers say of a plan. Pure."""
    first = properties(plan.attempts[0].request)
    found = [of_quota(plan, "", answers.get("quotas of the project"), project)]
    for attempt in firsts(plan, lambda attempt: attempt.region):
        net = net_of(first, attempt.region, project)
        found += [of_net(plan, net, answers), of_firewall(plan, net, answers)]
    for attempt in firsts(plan, lambda attempt: f"{attempt.region} {attempt.provisioning}"):
        found.append(of_quota(plan, attempt.region, answers.get(f"quotas of {attempt.region}"), project, attempt))
    for attempt in firsts(plan, lambda attempt: attempt.zone):
        if attempt.zone and machine(attempt) in answers and answers[machine(attempt)] is None:
            found.append(no_machine(attempt.machine_type, attempt.zone, project))
    if "image" in answers and answers["image"] is None:
        found.append(no_image(source(first)))
    return [each for each in found if each is not None]


def of_net(plan: Plan, net: Net, answers: Answers) -> Finding | None:
    """What is missing of a region's network."""
    if subnetwork(net) not in answers:
        return None
    there = answers[subnetwork(net)]
    if there is None:
        return absent(net)
    image = read(plan.attempts[0].request).image if plan.image else None
    return reach(net, there, answers.get(f"routers of {net.region}"), image)


def of_firewall(plan: Plan, net: Net, answers: Answers) -> Finding | None:
    """What a network's firewall stops: the traffic between several nodes in a region, or SSH."""
    there, rules = answers.get(subnetwork(net)) or {}, answers.get("firewall rules")
    network, account = net.network or last(there.get("network", "")), read(plan.attempts[0].request).account
    if rules is None or not network:
        return None
    if plan.machine.nodes > 1:
        return between_nodes(net, network, there, rules, account)
    return ssh(net, network, rules, account) if by_iap(plan) else None


def of_quota(
    plan: Plan, region: str, answer: Mapping[str, Any] | None, project: str, attempt: Attempt | None = None
) -> Finding | None:
    """What is missing of a quota: of a region's for one way of provisioning, or of the whole project's."""
    total = plan.machine.gpus * plan.machine.nodes
    units = used(plan, attempt.provisioning) if attempt else Units(metric=EVERYWHERE, units=total)
    if units is None or answer is None or not total:
        return None
    model = attempt.provisioning if attempt else plan.attempts[0].provisioning
    finding = short(units, model, region, answer.get("quotas", ()))
    if finding is None or finding.scope == "warning":
        return finding
    return finding._replace(fix=raising(project, region, model, units, answer.get("quotas", ())))


def used(plan: Plan, provisioning: str) -> Units | None:
    """What one attempt uses up in its region; None: that quota's name isn't known, or not shown there."""
    known, wanted = catalog.load(), (plan.machine.gpu, plan.machine.gpus)
    shapes = known.machines.get(plan.machine.machine_type, ())
    found = next((one for one in shapes if (known.gpus[one.gpu].title, one.gpus) == wanted), None)
    quota = known.quota(found, "compute", provisioning) if found else None
    if quota is None or not quota.metric or quota.dims:
        return None
    instead = quota.metric.removeprefix("PREEMPTIBLE_") if quota.metric.startswith("PREEMPTIBLE_") else ""
    return Units(metric=quota.metric, units=quota.units * plan.machine.nodes, instead=instead)


def raising(project: str, region: str, provisioning: str, units: Units, quotas: Any) -> str:
    """The command that asks for more: the one that a refusal would name."""
    limit = next((each["limit"] for each in quotas if each.get("metric") == units.metric), 0.0)
    where = f"in region {region}." if region else "globally."
    message = f"Quota '{units.metric}' exceeded.  Limit: {limit:.1f} {where}"
    tried = Tried(project=project, region=region, provisioning=provisioning, zone=f"{region}-a", gpus=units.units)
    return of_refusal(Refusal(code=403, message=message, reason="quotaExceeded", service="compute"), tried).fix
