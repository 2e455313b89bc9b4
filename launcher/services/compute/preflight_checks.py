"""Pure preflight checks: network, firewall, quota, machine type, image.

A VM without an external IP reaches Google's APIs and pkg.dev if its subnetwork has Private Google Access, and the
internet through Cloud NAT, which includes the former
(https://cloud.google.com/vpc/docs/private-google-access, https://cloud.google.com/nat/docs/overview).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from launcher.catalog.model import QuotaFigures
from launcher.jobs.vm import last_url_part
from launcher.plan.model import Attempt
from launcher.services.compute.firewall import Block, Traffic, block

IAP: Final = "35.235.240.0/20"
"""The source addresses of IAP's tunnels (https://cloud.google.com/iap/docs/using-tcp-forwarding)."""
SSH_PORT: Final = 22
UNPRIVILEGED: Final = range(1024, 65536)
"""The ports that the nodes' processes listen on."""
GOOGLE_REGISTRY: Final = re.compile(r"[\w.-]*(?:pkg\.dev|gcr\.io)/")


class VmFinding(NamedTuple):
    """A missing requirement.

    A refusal means that a VM can't be created, or can't work, in a `place` (region or zone; empty: any) with a
    provisioning model (empty: any).
    """

    scope: Literal["warning", "refusal"]
    problem: str
    fix: str = ""
    """Commands, one per line."""
    place: str = ""
    provisioning: str = ""
    quotas: tuple[QuotaFigures, ...] = ()

    def applies_to(self, attempt: Attempt) -> bool:
        """Return whether the finding is about an attempt's placement."""
        same_place = self.place in ("", attempt.region, attempt.zone)
        return same_place and self.provisioning in ("", attempt.provisioning)


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
    """Return the network of an Instance in a region."""
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
    """Return whether an Instance has an external IP address."""
    return bool((instance.get("networkInterfaces") or [{}])[0].get("accessConfigs"))


# --- The network ------------------------------------------------------------------------------------------------------


def check_outbound_access(
    net: VmNetwork, subnetwork: Mapping[str, Any] | None, routers: Sequence[Mapping[str, Any]] | None, image: str | None
) -> VmFinding | None:
    """Return a finding if a VM without an external IP can't reach what it needs, or None.

    `image` is the container image that it pulls, or None for a workstation. `subnetwork` and `routers` are None if they
    could not be read.
    """
    if routers is None or subnetwork is None or has_nat(net, subnetwork, routers):
        return None
    is_private = bool(subnetwork.get("privateIpGoogleAccess"))
    where = f"subnetwork {net.subnetwork} in {net.region}"
    if is_private and image is not None and GOOGLE_REGISTRY.match(image):
        return None
    if is_private:
        target = "packages and GitHub" if image is None else image.partition("@")[0]
        problem = f"{where} has no Cloud NAT: without an external IP the VM can't reach {target}"
        return VmFinding("warning" if image is None else "refusal", problem, nat_commands(net, subnetwork), net.region)
    problem = f"{where} has neither Private Google Access nor Cloud NAT: without an external IP the VM has no network"
    if image is not None and GOOGLE_REGISTRY.match(image):
        return VmFinding("refusal", problem, private_access_command(net), net.region)
    fix = nat_commands(net, subnetwork)
    if image is None:
        return VmFinding("warning", problem, f"{private_access_command(net)}\n{fix}", net.region)
    return VmFinding("refusal", problem, fix, net.region)


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


def private_access_command(net: VmNetwork) -> str:
    """Return the command that turns on Private Google Access."""
    return (
        f"gcloud compute networks subnets update {net.subnetwork} --region={net.region} --project={net.project} "
        "--enable-private-ip-google-access"
    )


def nat_commands(net: VmNetwork, subnetwork: Mapping[str, Any]) -> str:
    """Return the commands that create Cloud NAT."""
    network = net.network or last_url_part(subnetwork.get("network", "")) or "NETWORK"
    where = f"--region={net.region} --project={net.project}"
    return (
        f"gcloud compute routers create launch-nat --network={network} {where}\n"
        f"gcloud compute routers nats create launch-nat --router=launch-nat {where} "
        "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
    )


def check_iap_ssh(net: VmNetwork, network: str, rules: Sequence[Mapping[str, Any]], account: str) -> VmFinding | None:
    """Return a warning if the firewall blocks IAP's tunnel to a VM's SSH server, or None."""
    blocked = block(rules, network, Traffic("INGRESS", IAP, range(SSH_PORT, SSH_PORT + 1), account))
    if blocked is None:
        return None
    problem = f"{blocked_by(blocked, network)} IAP's tunnel: launch ssh can't reach the VM"
    fix = allow_command("launch-iap-ssh", net, network, blocked, f"--allow=tcp:{SSH_PORT}", IAP)
    return VmFinding("warning", problem, fix)


def check_node_traffic(
    net: VmNetwork, network: str, subnetwork: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], account: str
) -> VmFinding | None:
    """Return a refusal if the firewall blocks traffic between the nodes, or None.

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
            return VmFinding("refusal", problem, fix, net.region)
    return None


def blocked_by(blocked: Block, network: str) -> str:
    """Return the beginning of a sentence that says what blocks traffic."""
    if blocked.rule:
        return f"firewall rule {blocked.rule} of network {network} blocks"
    return f"no firewall rule of network {network} allows"


def allow_command(
    name: str, net: VmNetwork, network: str, blocked: Block, allow: str, peers: str, direction: str = "INGRESS"
) -> str:
    """Return the command that creates a firewall rule with precedence over the one that blocks the traffic."""
    where = "source" if direction == "INGRESS" else "destination"
    priority = f" --priority={max(0, blocked.priority - 1)}" if blocked.rule else ""
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
) -> VmFinding | None:
    """Return a refusal if a quota is too low, a warning if it is used up at the moment, or None.

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
        return VmFinding("warning", problem, "", region, provisioning, (figures,))
    problem = f"quota {use.metric} {where} is too low for {provisioning}: limit {limit:g}, {use.units} needed"
    return VmFinding("refusal", problem, "", region, provisioning if region else "", (figures,))
