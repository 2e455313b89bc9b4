"""Preflight checks of a plan's VMs against the project: quota, network, firewall, machine type, image.

They take about ten seconds and change nothing. What can't be read is not an obstacle: one line reports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from launcher import catalog
from launcher.diagnosis import Refusal, RequestContext, diagnose_refusal
from launcher.errors import LaunchError
from launcher.gcp.api import status_of, words
from launcher.gcp.parallel import call_once, together
from launcher.jobs.vm import last_url_part
from launcher.plan.model import Attempt, Plan
from launcher.services.compute.client import Compute
from launcher.services.compute.messages import as_json
from launcher.services.compute.preflight_checks import (
    QuotaNeed,
    VmFinding,
    VmNetwork,
    check_compute_quota_limit,
    check_iap_ssh,
    check_node_traffic,
    check_outbound_access,
    has_external_ip,
    network_of,
)
from launcher.services.request import read
from launcher.services.request.vm import properties

SECONDS: Final = 8.0
"""Timeout of one call. All run in parallel."""
MAX_PLACES: Final = 12
"""Maximum number of regions, and of zones, that are checked, in fallback order."""
GLOBAL_GPU_QUOTA: Final = "GPUS_ALL_REGIONS"

Answers = Mapping[str, Any]
"""The resource, as shown to the user → the response as JSON; None: it does not exist."""


def check(compute: Compute, plan: Plan) -> tuple[VmFinding, ...]:
    """Run all checks for a plan; return the findings, refusals first."""
    responses = together(api_calls(compute, plan))
    missing = {key for key, answer in responses.items() if isinstance(answer, LaunchError) and status_of(answer) == 404}
    unread = {key: each for key, each in responses.items() if isinstance(each, LaunchError) and key not in missing}
    answers = {key: None if key in missing else each for key, each in responses.items() if key not in unread}
    findings = evaluate(compute.project, plan, answers)
    if unread:
        problem = words(next(iter(unread.values())).problem)
        findings.append(VmFinding("warning", f"not checked: {', '.join(unread)} ({problem})"))
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.scope != "refusal"))


def allowed(plan: Plan, findings: tuple[VmFinding, ...]) -> tuple[Attempt, ...]:
    """Return the attempts to which no refusal applies."""
    refusals = [finding for finding in findings if finding.scope == "refusal"]
    return tuple(attempt for attempt in plan.attempts if not any(each.applies_to(attempt) for each in refusals))


# --- API calls --------------------------------------------------------------------------------------------------------


def api_calls(compute: Compute, plan: Plan) -> dict[str, Callable[[], Any]]:
    """Return the calls for all resources that the checks need; keys as in `Answers`."""
    first = properties(plan.attempts[0].request)
    calls: dict[str, Callable[[], Any]] = {"quotas of the project": partial(get, compute, "ProjectsClient", "get")}
    for attempt in first_per_place(plan, lambda attempt: attempt.region):
        net, region = network_of(first, attempt.region, compute.project), attempt.region
        where = {"project": net.project, "region": region}
        calls[f"quotas of {region}"] = partial(get, compute, "RegionsClient", "get", region=region)
        if not has_external_ip(first) or plan.machine.nodes > 1:
            arguments = {**where, "subnetwork": net.subnetwork}
            calls[subnetwork_key(net)] = partial(get, compute, "SubnetworksClient", "get", **arguments)
        if not has_external_ip(first):
            calls[f"routers of {region}"] = partial(list_first_page, compute, "RoutersClient", **where)
    for attempt in first_per_place(plan, lambda attempt: attempt.zone):
        calls[machine_key(attempt)] = partial(
            get, compute, "MachineTypesClient", "get", zone=attempt.zone, machine_type=attempt.machine_type
        )
    if uses_iap(plan) or plan.machine.nodes > 1:
        net = network_of(first, plan.attempts[0].region, compute.project)
        calls["firewall rules"] = partial(list_first_page, compute, "FirewallsClient", project=net.project)
    if match := IMAGE.search(source_image(first)):
        project, family, name = match.groups()
        method, arguments = ("get_from_family", {"family": name}) if family else ("get", {"image": name})
        calls["image"] = partial(get, compute, "ImagesClient", method, project=project, **arguments)
    return calls


def uses_iap(plan: Plan) -> bool:
    """Return whether launch ssh reaches the plan's VMs through IAP's tunnel."""
    return plan.image is None and not has_external_ip(properties(plan.attempts[0].request))


IMAGE: Final = re.compile(r"projects/([^/]+)/global/images/(family/)?([^/]+)$")


def source_image(instance: Mapping[str, Any]) -> str:
    """Return the URL of the image or image family that an Instance boots."""
    return str(instance["disks"][0].get("initializeParams", {}).get("sourceImage", ""))


def subnetwork_key(net: VmNetwork) -> str:
    """Return the key of a subnetwork in `Answers`."""
    return f"subnetwork {net.subnetwork} of {net.region}"


def machine_key(attempt: Attempt) -> str:
    """Return the key of an attempt's machine type in `Answers`."""
    return f"{attempt.machine_type} in {attempt.zone}"


def first_per_place(plan: Plan, key: Callable[[Attempt], str | None]) -> list[Attempt]:
    """Return the first attempt of each place (`key`), at most `MAX_PLACES`."""
    last_first = {place: attempt for attempt in reversed(plan.attempts) if (place := key(attempt))}
    return list(last_first.values())[::-1][:MAX_PLACES]


def get(compute: Compute, client: str, method: str, **arguments: Any) -> Any:
    """Call a method once and return its response as JSON. Raises LaunchError."""
    return as_json(call_once(compute.api(client), method, SECONDS, **{"project": compute.project, **arguments}))


def list_first_page(compute: Compute, client: str, **arguments: Any) -> Any:
    """Return the first page of a list, which holds more items than a project usually has. Raises LaunchError."""
    pager = call_once(compute.api(client), "list", SECONDS, **{"project": compute.project, **arguments})
    return [as_json(each) for each in next(iter(pager.pages)).items]


# --- Evaluation -------------------------------------------------------------------------------------------------------


def evaluate(project: str, plan: Plan, answers: Answers) -> list[VmFinding]:
    """Return what is missing for a plan. Pure."""
    first = properties(plan.attempts[0].request)
    findings = [check_compute_quota(plan, "", answers.get("quotas of the project"), project)]
    for attempt in first_per_place(plan, lambda attempt: attempt.region):
        net = network_of(first, attempt.region, project)
        findings += [check_network(plan, net, answers), check_firewall(plan, net, answers)]
    for attempt in first_per_place(plan, lambda attempt: f"{attempt.region} {attempt.provisioning}"):
        findings.append(
            check_compute_quota(plan, attempt.region, answers.get(f"quotas of {attempt.region}"), project, attempt)
        )
    for attempt in first_per_place(plan, lambda attempt: attempt.zone):
        if attempt.zone and machine_key(attempt) in answers and answers[machine_key(attempt)] is None:
            machine, where = attempt.machine_type, f"--project={project}"
            fix = f'gcloud compute machine-types list {where} --filter="name={machine}" --format="value(zone)"'
            problem = f"machine type {machine} is not available in {attempt.zone}"
            findings.append(VmFinding("refusal", problem, fix, attempt.zone))
    if "image" in answers and answers["image"] is None:
        source = source_image(first)
        owner = match[1] if (match := re.search(r"projects/([^/]+)/", source)) else ""
        kind = "image family" if "/family/" in source else "image"
        problem = f"{kind} {last_url_part(source)} does not exist in project {owner}"
        fix = f'gcloud compute images list --project={owner} --no-standard-images --format="value(family)"'
        findings.append(VmFinding("refusal", problem, fix))
    return [each for each in findings if each is not None]


def check_network(plan: Plan, net: VmNetwork, answers: Answers) -> VmFinding | None:
    """Return what is missing in a region's network, or None."""
    if subnetwork_key(net) not in answers:
        return None
    subnetwork = answers[subnetwork_key(net)]
    if subnetwork is None:
        problem = f"subnetwork {net.subnetwork} does not exist in {net.region} of project {net.project}"
        fix = f"gcloud compute networks subnets list --project={net.project} --filter=region:{net.region}"
        return VmFinding("refusal" if net.is_named else "warning", problem, fix, net.region)
    image = read(plan.attempts[0].request).image if plan.image else None
    return check_outbound_access(net, subnetwork, answers.get(f"routers of {net.region}"), image)


def check_firewall(plan: Plan, net: VmNetwork, answers: Answers) -> VmFinding | None:
    """Return what the firewall blocks, or None: traffic between the nodes, or SSH to a workstation."""
    subnetwork, rules = answers.get(subnetwork_key(net)) or {}, answers.get("firewall rules")
    network, account = (
        net.network or last_url_part(subnetwork.get("network", "")),
        read(plan.attempts[0].request).account,
    )
    if rules is None or not network:
        return None
    if plan.machine.nodes > 1:
        return check_node_traffic(net, network, subnetwork, rules, account)
    return check_iap_ssh(net, network, rules, account) if uses_iap(plan) else None


def check_compute_quota(
    plan: Plan, region: str, answer: Mapping[str, Any] | None, project: str, attempt: Attempt | None = None
) -> VmFinding | None:
    """Return which quota is too low, or None: a region's for one provisioning model, or the project's."""
    total = plan.machine.gpus * plan.machine.nodes
    use = quota_need(plan, attempt.provisioning) if attempt else QuotaNeed(metric=GLOBAL_GPU_QUOTA, units=total)
    if use is None or answer is None or not total:
        return None
    model = attempt.provisioning if attempt else plan.attempts[0].provisioning
    finding = check_compute_quota_limit(use, model, region, answer.get("quotas", ()))
    if finding is None or finding.scope == "warning":
        return finding
    return finding._replace(fix=increase_command(project, region, model, use, answer.get("quotas", ())))


def quota_need(plan: Plan, provisioning: str) -> QuotaNeed | None:
    """Return what one attempt uses of a quota in its region; None: the quota's name is unknown, or not listed there."""
    known, wanted = catalog.load(), (plan.machine.gpu, plan.machine.gpus)
    shapes = known.machines.get(plan.machine.machine_type, ())
    shape = next((shape for shape in shapes if (known.gpus[shape.gpu].title, shape.gpus) == wanted), None)
    quota = known.quota(shape, "compute", provisioning) if shape else None
    if quota is None or not quota.metric or quota.dims:
        return None
    fallback = quota.metric.removeprefix("PREEMPTIBLE_") if quota.metric.startswith("PREEMPTIBLE_") else ""
    return QuotaNeed(metric=quota.metric, units=quota.units * plan.machine.nodes, fallback=fallback)


def increase_command(project: str, region: str, provisioning: str, use: QuotaNeed, quotas: Any) -> str:
    """Return the command that requests a higher quota, as the diagnosis of Google's refusals shows it."""
    limit = next((each["limit"] for each in quotas if each.get("metric") == use.metric), 0.0)
    where = f"in region {region}." if region else "globally."
    message = f"Quota '{use.metric}' exceeded.  Limit: {limit:.1f} {where}"
    context = RequestContext(
        project=project, region=region, provisioning=provisioning, zone=f"{region}-a", gpus=use.units
    )
    return diagnose_refusal(Refusal(code=403, message=message, reason="quotaExceeded", service="compute"), context).fix
