"""Check a plan's VMs against the project: quota, network, firewall, machine type, image.

The reads take about ten seconds and change nothing. What can't be read is not an obstacle: one line reports it.

A VM without an external IP reaches Google's APIs and pkg.dev if its subnetwork has Private Google Access, and the
internet through Cloud NAT, which includes the former
(https://cloud.google.com/vpc/docs/private-google-access, https://cloud.google.com/nat/docs/overview).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launcher import catalog
from launcher.catalog.model import QuotaFigures
from launcher.diagnosis import Refusal, RequestContext, diagnose_refusal
from launcher.errors import LaunchError
from launcher.gcp.api import words
from launcher.gcp.parallel import together
from launcher.jobs.vm import last_url_part
from launcher.plan.model import Attempt, Plan
from launcher.project.firewall import Block, Traffic, block
from launcher.project.model import Check, by_severity, settled
from launcher.services.compute.client import Compute, as_json
from launcher.services.request import read
from launcher.services.request.vm import properties

SECONDS: Final = 8.0
"""Timeout of one call. All run in parallel."""
MAX_PLACES: Final = 12
"""Maximum number of regions, and of zones, that are checked, in fallback order."""
GLOBAL_GPU_QUOTA: Final = "GPUS_ALL_REGIONS"
IAP: Final = "35.235.240.0/20"
"""The source addresses of IAP's tunnels (https://cloud.google.com/iap/docs/using-tcp-forwarding)."""
SSH_PORT: Final = 22
UNPRIVILEGED: Final = range(1024, 65536)
"""The ports that the nodes' processes listen on."""
GOOGLE_REGISTRY: Final = re.compile(r"[\w.-]*(?:pkg\.dev|gcr\.io)/")

Answers = Mapping[str, Any]
"""The resource, as shown to the user → the response as JSON; None: it does not exist."""


def check_vms(compute: Compute, plan: Plan) -> tuple[Check, ...]:
    """Run all checks of a plan's VMs; return what does not fit, failures first."""
    answers = settled(together(api_calls(compute, plan)))
    unread = {key: answers.pop(key) for key in [*answers] if isinstance(answers[key], LaunchError)}
    checks = [*evaluate(compute.project, plan, answers)]
    if unread:
        problem = words(next(iter(unread.values())).problem)
        checks.append(Check("vm", "unknown", f"not checked: {', '.join(unread)} ({problem})"))
    return by_severity(dict.fromkeys(checks))


class VmNetwork(Struct, frozen=True, kw_only=True):
    """The network of a VM's first interface, in one region."""

    project: str
    region: str
    network: str
    """Empty: the subnetwork's network."""
    subnetwork: str
    """If the spec names none: the network's name, as in auto-mode networks, or `default`."""
    is_named: bool
    """True if the spec names the subnetwork."""


def network_of(instance: Mapping[str, Any], region: str, project: str) -> VmNetwork:
    interface = (instance.get("networkInterfaces") or [{}])[0]
    network, subnetwork = interface.get("network", ""), interface.get("subnetwork", "")
    shared = re.search(r"projects/([^/]+)/", subnetwork or network)
    return VmNetwork(
        project=shared[1] if shared else project,
        region=region,
        network=last_url_part(network),
        subnetwork=last_url_part(subnetwork) or last_url_part(network) or "default",
        is_named=bool(subnetwork),
    )


def has_external_ip(instance: Mapping[str, Any]) -> bool:
    return bool((instance.get("networkInterfaces") or [{}])[0].get("accessConfigs"))


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
    return as_json(compute.api(client).once(method, SECONDS, **{"project": compute.project, **arguments}))


def list_first_page(compute: Compute, client: str, **arguments: Any) -> Any:
    """Return the first page of a list, which holds more items than a project usually has. Raises LaunchError."""
    pager = compute.api(client).once("list", SECONDS, **{"project": compute.project, **arguments})
    return [as_json(each) for each in next(iter(pager.pages)).items]


# --- Evaluation -------------------------------------------------------------------------------------------------------


def evaluate(project: str, plan: Plan, answers: Answers) -> Iterator[Check]:
    """Return what is missing for a plan. Pure."""
    first = properties(plan.attempts[0].request)
    checks = [check_compute_quota(plan, "", answers.get("quotas of the project"), project)]
    for attempt in first_per_place(plan, lambda attempt: attempt.region):
        net = network_of(first, attempt.region, project)
        checks += [check_network(plan, net, answers), check_firewall(plan, net, answers)]
    for attempt in first_per_place(plan, lambda attempt: f"{attempt.region} {attempt.provisioning}"):
        checks.append(
            check_compute_quota(plan, attempt.region, answers.get(f"quotas of {attempt.region}"), project, attempt)
        )
    for attempt in first_per_place(plan, lambda attempt: attempt.zone):
        if attempt.zone and machine_key(attempt) in answers and answers[machine_key(attempt)] is None:
            machine, where = attempt.machine_type, f"--project={project}"
            fix = f'gcloud compute machine-types list {where} --filter="name={machine}" --format="value(zone)"'
            problem = f"machine type {machine} is not available in {attempt.zone}"
            checks.append(Check("vm", "failed", problem, fix, attempt.zone))
    if "image" in answers and answers["image"] is None:
        source = source_image(first)
        owner = match[1] if (match := re.search(r"projects/([^/]+)/", source)) else ""
        kind = "image family" if "/family/" in source else "image"
        fix = f'gcloud compute images list --project={owner} --no-standard-images --format="value(family)"'
        checks.append(Check("vm", "failed", f"{kind} {last_url_part(source)} does not exist in project {owner}", fix))
    yield from filter(None, checks)


def check_network(plan: Plan, net: VmNetwork, answers: Answers) -> Check | None:
    """Return what is missing in a region's network, or None."""
    if subnetwork_key(net) not in answers:
        return None
    subnetwork = answers[subnetwork_key(net)]
    if subnetwork is None:
        problem = f"subnetwork {net.subnetwork} does not exist in {net.region} of project {net.project}"
        fix = f"gcloud compute networks subnets list --project={net.project} --filter=region:{net.region}"
        return Check("vm", "failed" if net.is_named else "warning", problem, fix, net.region)
    image = read(plan.attempts[0].request).image if plan.image else None
    return check_outbound_access(net, subnetwork, answers.get(f"routers of {net.region}"), image)


def check_firewall(plan: Plan, net: VmNetwork, answers: Answers) -> Check | None:
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
) -> Check | None:
    """Return which quota is too low, or None: a region's for one provisioning model, or the project's."""
    total = plan.machine.gpus * plan.machine.nodes
    use = quota_need(plan, attempt.provisioning) if attempt else QuotaNeed(metric=GLOBAL_GPU_QUOTA, units=total)
    if use is None or answer is None or not total:
        return None
    model = attempt.provisioning if attempt else plan.attempts[0].provisioning
    check = check_compute_quota_limit(use, model, region, answer.get("quotas", ()))
    if check is None or check.status == "warning":
        return check
    return replace(check, fix=increase_command(project, region, model, use, answer.get("quotas", ())))


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


# --- The network ------------------------------------------------------------------------------------------------------


def check_outbound_access(
    net: VmNetwork, subnetwork: Mapping[str, Any] | None, routers: Sequence[Mapping[str, Any]] | None, image: str | None
) -> Check | None:
    """Return a check that fails or warns if a VM without an external IP can't reach what it needs, or None.

    `image` is the container image that it pulls, or None for a workstation. `subnetwork` and `routers` are None if they
    could not be read.
    """
    if routers is None or subnetwork is None or has_nat(net, subnetwork, routers):
        return None
    is_private = bool(subnetwork.get("privateIpGoogleAccess"))
    is_google = image is not None and GOOGLE_REGISTRY.match(image) is not None
    if is_private and is_google:
        return None
    where = f"subnetwork {net.subnetwork} in {net.region}"
    fix = nat_commands(net, subnetwork)
    if is_private:
        target = "packages and GitHub" if image is None else image.partition("@")[0]
        problem = f"{where} has no Cloud NAT: without an external IP the VM can't reach {target}"
    else:
        problem = (
            f"{where} has neither Private Google Access nor Cloud NAT: without an external IP the VM has no network"
        )
        access = (
            f"gcloud compute networks subnets update {net.subnetwork} --region={net.region} --project={net.project} "
            "--enable-private-ip-google-access"
        )
        fix = access if is_google else f"{access}\n{fix}" if image is None else fix
    return Check("vm", "warning" if image is None else "failed", problem, fix, net.region)


def has_nat(net: VmNetwork, subnetwork: Mapping[str, Any], routers: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether Cloud NAT on a router of the region covers the subnetwork."""
    network = net.network or last_url_part(subnetwork.get("network", ""))
    nats = [
        nat
        for router in routers
        if last_url_part(router.get("network", "")) == network
        for nat in router.get("nats", ())
    ]
    return any(
        str(nat.get("sourceSubnetworkIpRangesToNat", "")).startswith("ALL_SUBNETWORKS")
        or any(last_url_part(each.get("name", "")) == net.subnetwork for each in nat.get("subnetworks", ()))
        for nat in nats
    )


def nat_commands(net: VmNetwork, subnetwork: Mapping[str, Any], name: str = "launch-nat") -> str:
    """Return the commands that create Cloud NAT on a router of this name."""
    network = net.network or last_url_part(subnetwork.get("network", "")) or "NETWORK"
    where = f"--region={net.region} --project={net.project}"
    return (
        f"gcloud compute routers create {name} --network={network} {where}\n"
        f"gcloud compute routers nats create {name} --router={name} {where} "
        "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
    )


def check_iap_ssh(net: VmNetwork, network: str, rules: Sequence[Mapping[str, Any]], account: str) -> Check | None:
    """Return a warning if the firewall blocks IAP's tunnel to a VM's SSH server, or None."""
    blocked = block(rules, network, Traffic("INGRESS", IAP, range(SSH_PORT, SSH_PORT + 1), account))
    if blocked is None:
        return None
    fix = allow_command("launch-iap-ssh", net, network, blocked, f"--allow=tcp:{SSH_PORT}", IAP)
    return Check("vm", "warning", f"{blocked_by(blocked, network)} IAP's tunnel: launch ssh can't reach the VM", fix)


def check_node_traffic(
    net: VmNetwork, network: str, subnetwork: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], account: str
) -> Check | None:
    """Return a failed check if the firewall blocks traffic between the nodes, or None.

    They need launch_train.node's control store and torchrun's rendezvous on node 0, and NCCL's sockets, which use any
    free port. Without it they hang at the rendezvous.
    """
    peers = subnetwork.get("ipCidrRange", "")
    if not peers:
        return None
    for direction in ("INGRESS", "EGRESS"):
        blocked = block(rules, network, Traffic(direction, peers, UNPRIVILEGED, account, account))
        if blocked is not None:
            problem = (
                f"{blocked_by(blocked, network)} TCP between the nodes ({direction}, {peers}): they would hang at the "
                "rendezvous; hierarchical and network firewall policies were not read"
            )
            fix = allow_command("launch-internal", net, network, blocked, "--allow=tcp", peers, direction)
            return Check("vm", "failed", problem, fix, net.region)
    return None


def blocked_by(blocked: Block, network: str) -> str:
    """Return the beginning of a sentence that says what blocks traffic."""
    if blocked.rule:
        return f"firewall rule {blocked.rule} of network {network} blocks"
    return f"no firewall rule of network {network} allows"


def allow_command(
    name: str, net: VmNetwork, network: str, blocked: Block | None, allow: str, peers: str, direction: str = "INGRESS"
) -> str:
    """Return the command that creates a firewall rule, with precedence over the one that blocks the traffic, if any."""
    where = "source" if direction == "INGRESS" else "destination"
    priority = f" --priority={max(0, blocked.priority - 1)}" if blocked and blocked.rule else ""
    return (
        f"gcloud compute firewall-rules create {name} --project={net.project} --network={network} "
        f"--direction={direction} {allow} --{where}-ranges={peers}{priority}"
    )


# --- Machines and quotas ----------------------------------------------------------------------------------------------


class QuotaNeed(Struct, frozen=True, kw_only=True):
    """The amount of a region's quota that all VMs of an attempt use.

    `fallback`: the standard quota, which Spot VMs use if the project has no preemptible quota
    (https://cloud.google.com/compute/docs/resource-usage, preemptible quotas). Google documents nothing for flex-start;
    it is treated the same way, so that no attempt is refused unnecessarily.
    """

    metric: str
    units: int
    fallback: str = ""


def check_compute_quota_limit(
    use: QuotaNeed, provisioning: str, region: str, quotas: Iterable[Mapping[str, Any]]
) -> Check | None:
    """Return a failed check if a quota is too low, a warning if it is used up at the moment, or None.

    An empty `region` means that the quota is the project's.
    """
    known = {entry.get("metric", ""): entry for entry in quotas}
    own = known.get(use.metric)
    quota = known.get(use.fallback, own) if own is not None and not own["limit"] else own
    if quota is None or quota["limit"] - quota.get("usage", 0) >= use.units:
        return None
    where = f"in {region}" if region else "in all regions together"
    limit, usage = quota["limit"], quota.get("usage", 0)
    figures = QuotaFigures(metric=use.metric, region=region, limit=limit, used=usage, needed=use.units)
    if limit >= use.units:
        problem = f"quota {quota['metric']} {where} is used up: {usage:g} of {limit:g} in use, {use.units} needed"
        figures = replace(figures, metric=quota["metric"])
        return Check("quota", "warning", problem, place=region, provisioning=provisioning, quotas=(figures,))
    return Check(
        "quota",
        "failed",
        f"quota {use.metric} {where} is too low for {provisioning}: limit {limit:g}, {use.units} needed",
        place=region,
        provisioning=provisioning if region else "",
        quotas=(figures,),
    )
