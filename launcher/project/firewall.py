"""Evaluate a network's VPC firewall rules for traffic to or from VMs without network tags. Pure.

The rule with the lowest priority number decides, and deny wins among equals. Where no rule matches, ingress is denied
and egress allowed (https://cloud.google.com/firewall/docs/firewalls). Hierarchical and network firewall policies are
not read. Such a policy may allow what is blocked here, or block what is allowed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, collapse_addresses, ip_network
from typing import Any, Literal, NamedTuple

from launcher.jobs.vm import last_url_part

DEFAULT_PRIORITY = 1000


class Traffic(NamedTuple):
    """TCP traffic between a VM and its peers.

    `account` is the VM's own service account. `peers_account` is that of all peers, or empty if they are outside the
    network.
    """

    direction: Literal["INGRESS", "EGRESS"]
    peers: str
    """The peers' addresses as a CIDR range."""
    ports: range
    account: str
    peers_account: str = ""


class Block(NamedTuple):
    """The reason why traffic is blocked: the name of a deny rule, or an empty `rule` if no rule allows it."""

    rule: str
    priority: int


def block(rules: Iterable[Mapping[str, Any]], network: str, traffic: Traffic) -> Block | None:
    """Return the rule that blocks any part of the traffic in a network, or None."""
    left = set(traffic.ports)
    for rule in sorted((rule for rule in rules if applies(rule, network, traffic)), key=rank):
        if not left & ports_of(rule):
            continue
        if "denied" in rule:
            if concerns(rule, traffic, partly=True):
                return Block(rule.get("name", ""), rank(rule)[0])
        elif concerns(rule, traffic, partly=False):
            left -= ports_of(rule)
    return Block("", DEFAULT_PRIORITY + 1) if left and traffic.direction == "INGRESS" else None


def applies(rule: Mapping[str, Any], network: str, traffic: Traffic) -> bool:
    """Return whether a rule is enforced for the VM and this direction."""
    if rule.get("disabled") or last_url_part(rule["network"]) != network or rule.get("targetTags"):
        return False
    targets = rule.get("targetServiceAccounts") or [traffic.account]
    return rule.get("direction", "INGRESS") == traffic.direction and traffic.account in targets


def rank(rule: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the sort key by which rules are evaluated."""
    return int(rule.get("priority", DEFAULT_PRIORITY)), "denied" not in rule


def ports_of(rule: Mapping[str, Any]) -> set[int]:
    """Return the TCP ports that a rule allows or denies."""
    parts = [*rule.get("allowed", ()), *rule.get("denied", ())]
    return {port for part in parts if part.get("IPProtocol") in ("tcp", "6", "all") for port in port_numbers(part)}


def port_numbers(part: Mapping[str, Any]) -> Sequence[int]:
    """Return the ports of one protocol, or all ports if none is named."""
    spans = [str(port).partition("-") for port in part.get("ports", ())]
    return [n for first, _, end in spans for n in range(int(first), int(end or first) + 1)] if spans else range(65536)


def concerns(rule: Mapping[str, Any], traffic: Traffic, *, partly: bool) -> bool:
    """Return whether a rule matches all peers, or with `partly` any of them."""
    ranges = rule.get("sourceRanges" if traffic.direction == "INGRESS" else "destinationRanges", ())
    accounts = rule.get("sourceServiceAccounts", ())
    if not ranges and not accounts and not rule.get("sourceTags"):
        ranges = ["0.0.0.0/0"]
    peers = IPv4Network(traffic.peers)
    known = [
        network for network in (ip_network(text, strict=False) for text in ranges) if isinstance(network, IPv4Network)
    ]
    inside = any(
        peers.overlaps(network) if partly else peers.subnet_of(network) for network in collapse_addresses(known)
    )
    return inside or bool(traffic.peers_account and traffic.peers_account in accounts)
