"""What a plan's VMs need of a project, held against what the project has. Pure.

The network: a VM without an external IP reaches Google's APIs and pkg.dev where its subnetwork has Private Google
Access, and the rest of the world where there is Cloud NAT (which brings the former with it;
https://cloud.google.com/vpc/docs/private-google-access, https://cloud.google.com/nat/docs/overview).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from msgspec import Struct

from launcher.compute.firewall import Block, Traffic, block
from launcher.jobs.vm import last
from launcher.plan.model import Attempt

IAP: Final = "35.235.240.0/20"
"""From where IAP's tunnels come (https://cloud.google.com/iap/docs/using-tcp-forwarding)."""
SSH: Final = 22
UNPRIVILEGED: Final = range(1024, 65536)
"""The ports that the nodes' processes listen on."""
GOOGLES: Final = re.compile(r"[\w.-]*(?:pkg\.dev|gcr\.io)/")


class Finding(NamedTuple):
    """What is missing. A refusal says that a VM can't be had, or not work, in a place (a region or a zone; empty:
    anywhere) with a provisioning model (empty: any)."""

    scope: Literal["warning", "refusal"]
    problem: str
    fix: str = ""
    """Commands, a line each."""
    place: str = ""
    provisioning: str = ""

    def holds_for(self, attempt: Attempt) -> bool:
        """Whether it is about an attempt."""
        where = self.place in ("", attempt.region, attempt.zone)
        return where and self.provisioning in ("", attempt.provisioning)


class Net(Struct, frozen=True, kw_only=True):
    """Where a VM's first interface is, in one region."""

    project: str
    region: str
    network: str
    """Empty: the subnetwork's, whichever that is."""
    subnetwork: str
    """Where none is named: a network that makes its own has one of its own name in each region."""
    is_named: bool
    """Whether the subnetwork was named."""


def net_of(instance: Mapping[str, Any], region: str, project: str) -> Net:
    """Where an Instance is to be."""
    interface = (instance.get("networkInterfaces") or [{}])[0]
    network, subnetwork = interface.get("network", ""), interface.get("subnetwork", "")
    shared = re.search(r"projects/([^/]+)/", subnetwork or network)
    return Net(
        project=shared[1] if shared else project,
        region=region,
        network=last(network),
        subnetwork=last(subnetwork) or last(network) or "default",
        is_named=bool(subnetwork),
    )


def has_external_ip(instance: Mapping[str, Any]) -> bool:
    """Whether it gets one."""
    return bool((instance.get("networkInterfaces") or [{}])[0].get("accessConfigs"))


# --- The network ------------------------------------------------------------------------------------------------------


def reach(
    net: Net, subnetwork: Mapping[str, Any] | None, routers: Sequence[Mapping[str, Any]] | None, image: str | None
) -> Finding | None:
    """What a VM without an external IP can't reach; `image` is what it pulls, None: it is there to work on. What
    could not be read is None."""
    if routers is None or subnetwork is None or has_nat(net, subnetwork, routers):
        return None
    private = bool(subnetwork.get("privateIpGoogleAccess"))
    where = f"subnetwork {net.subnetwork} in {net.region}"
    if private and image is not None and GOOGLES.match(image):
        return None
    if private:
        what = "packages and GitHub" if image is None else image.partition("@")[0]
        problem = f"{where} has no Cloud NAT: without an external IP the VM can't reach {what}"
        return Finding("warning" if image is None else "refusal", problem, nat(net, subnetwork), net.region)
    problem = f"{where} has neither Private Google Access nor Cloud NAT: without an external IP the VM reaches nothing"
    if image is not None and GOOGLES.match(image):
        return Finding("refusal", problem, private_access(net), net.region)
    fix = f"{private_access(net)}\n{nat(net, subnetwork)}" if image is None else nat(net, subnetwork)
    return Finding("warning" if image is None else "refusal", problem, fix, net.region)


def absent(net: Net) -> Finding:
    """There is no such subnetwork."""
    problem = f"there is no subnetwork {net.subnetwork} in {net.region} of project {net.project}"
    listed = f"gcloud compute networks subnets list --project={net.project} --filter=region:{net.region}"
    return Finding("refusal" if net.is_named else "warning", problem, listed, net.region)


def has_nat(net: Net, subnetwork: Mapping[str, Any], routers: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a router of the region translates the subnetwork's addresses."""
    network = net.network or last(subnetwork.get("network", ""))
    nats = [one for router in routers if last(router.get("network", "")) == network for one in router.get("nats", ())]
    return any(
        str(one.get("sourceSubnetworkIpRangesToNat", "")).startswith("ALL_SUBNETWORKS")
        or any(last(each.get("name", "")) == net.subnetwork for each in one.get("subnetworks", ()))
        for one in nats
    )


def private_access(net: Net) -> str:
    """The command that opens Google's APIs."""
    return (
        f"gcloud compute networks subnets update {net.subnetwork} --region={net.region} --project={net.project} "
        "--enable-private-ip-google-access"
    )


def nat(net: Net, subnetwork: Mapping[str, Any]) -> str:
    """The commands that open the world."""
    network = net.network or last(subnetwork.get("network", "")) or "NETWORK"
    where = f"--region={net.region} --project={net.project}"
    return (
        f"gcloud compute routers create launch-nat --network={network} {where}\n"
        f"gcloud compute routers nats create launch-nat --router=launch-nat {where} "
        "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
    )


def ssh(net: Net, network: str, rules: Sequence[Mapping[str, Any]], account: str) -> Finding | None:
    """Whether IAP's tunnel reaches a VM's SSH server."""
    found = block(rules, network, Traffic("INGRESS", IAP, range(SSH, SSH + 1), account))
    if found is None:
        return None
    problem = f"{stopper(found, network)} IAP's tunnel in: launch ssh can't reach the VM"
    return Finding("warning", problem, rule("launch-iap-ssh", net, network, found, f"--allow=tcp:{SSH}", IAP))


def between_nodes(
    net: Net, network: str, subnetwork: Mapping[str, Any], rules: Sequence[Mapping[str, Any]], account: str
) -> Finding | None:
    """Whether the nodes reach each other: launch_train.node's control store and torchrun's rendezvous on node 0, and
    NCCL's sockets, which take any free port. Without it they hang at rendezvous."""
    peers = subnetwork.get("ipCidrRange", "")
    if not peers:
        return None
    for direction in ("INGRESS", "EGRESS"):
        found = block(rules, network, Traffic(direction, peers, UNPRIVILEGED, account, account))
        if found is not None:
            problem = (
                f"{stopper(found, network)} TCP between the nodes through ({direction}, {peers}): they would hang at "
                "rendezvous; hierarchical and network firewall policies were not read"
            )
            fix = rule("launch-internal", net, network, found, "--allow=tcp", peers, direction)
            return Finding("refusal", problem, fix, net.region)
    return None


def stopper(found: Block, network: str) -> str:
    """The beginning of a sentence on what a firewall doesn't let through."""
    if found.rule:
        return f"firewall rule {found.rule} of network {network} doesn't let"
    return f"no firewall rule of network {network} lets"


def rule(name: str, net: Net, network: str, found: Block, allow: str, peers: str, direction: str = "INGRESS") -> str:
    """The command that makes a rule which is evaluated before what stops the traffic."""
    where = "source" if direction == "INGRESS" else "destination"
    priority = f" --priority={max(0, found.priority - 1)}" if found.rule else ""
    return (
        f"gcloud compute firewall-rules create {name} --project={net.project} --network={network} "
        f"--direction={direction} {allow} --{where}-ranges={peers}{priority}"
    )


# --- Machines and quotas ----------------------------------------------------------------------------------------------


class Units(Struct, frozen=True, kw_only=True):
    """What all VMs of an attempt use of a quota in a region. `instead`: the standard quota that Spot VMs use as long as
    the project has no preemptible quota (https://cloud.google.com/compute/docs/resource-usage, preemptible quotas); it
    counts for flex-start too, for which Google documents nothing, so that no attempt is refused without need."""

    metric: str
    units: int
    instead: str = ""


def short(units: Units, provisioning: str, region: str, quotas: Iterable[Mapping[str, Any]]) -> Finding | None:
    """Whether a quota of a region, or of the project (`region` empty), is too small, or used up just now."""
    known = {one.get("metric", ""): one for one in quotas}
    own = known.get(units.metric)
    room = known.get(units.instead, own) if own is not None and not own["limit"] else own
    if room is None or room["limit"] - room.get("usage", 0) >= units.units:
        return None
    where = f"in {region}" if region else "in all regions together"
    limit, usage = room["limit"], room.get("usage", 0)
    if limit >= units.units:
        problem = f"quota {room['metric']} {where} is used up: {usage:g} of {limit:g}, and {units.units} are needed"
        return Finding("warning", problem, "", region, provisioning)
    problem = f"quota {units.metric} {where} is too low for {provisioning}: {units.units} are needed, it is {limit:g}"
    return Finding("refusal", problem, "", region, provisioning if region else "")


def no_machine(machine: str, zone: str, project: str) -> Finding:
    """The zone doesn't have it."""
    fix = f'gcloud compute machine-types list --project={project} --filter="name={machine}" --format="value(zone)"'
    return Finding("refusal", f"there is no {machine} in {zone}", fix, zone)


def no_image(source: str) -> Finding:
    """There is nothing to boot."""
    project = first[1] if (first := re.search(r"projects/([^/]+)/", source)) else ""
    kind = "image family" if "/family/" in source else "image"
    listed = f'gcloud compute images list --project={project} --no-standard-images --format="value(family)"'
    return Finding("refusal", f"there is no {kind} {last(source)} in project {project}", listed)
