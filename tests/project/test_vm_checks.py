"""What would keep a plan's VMs from being made, or from being of use: found out on loopback, and judged in tables."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from launcher.plan.model import Plan
from launcher.project.model import Check
from launcher.project.preflight import allowed
from launcher.project.vm_checks import (
    IAP,
    QuotaNeed,
    VmNetwork,
    check_compute_quota_limit,
    check_iap_ssh,
    check_node_traffic,
    check_outbound_access,
    check_vms,
)
from launcher.testing.googlecloud import Fault, Reset, Status
from tests.plan.planning import planned
from tests.services.compute.vm_site import Site, plan_of

NET = VmNetwork(project="my-project", region="us-central1", network="default", subnetwork="default", is_named=False)
IMAGE = "us-docker.pkg.dev/my-project/launch/train@sha256:00"


def work_plan(**fields: Any) -> Plan:
    """A VM to work on, without an external IP unless it is said."""
    known = {"regions": ["us-central1"], "machine": {"type": "l4", "gpus": 1}, "provisioning": ["standard"], "run": {}}
    return planned("vm", world={"training": False}, **{**known, **fields})


# --- On loopback ------------------------------------------------------------------------------------------------------


def test_a_complete_project_has_no_findings(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    assert check_vms(site.compute, plan_of()) == ()
    methods = {(one.method, one.path.rpartition("/v1/")[2]) for one in site.cloud.requests}
    assert len(methods) == len(site.cloud.requests), "nothing is asked twice"
    assert {method for method, _ in methods} == {"GET"}


def test_a_training_vm_that_could_pull_nothing(site: Site) -> None:
    [found] = check_vms(site.compute, plan_of())
    assert (found.status, found.place) == ("failed", "us-central1")
    assert found.text == (
        "subnetwork default in us-central1 has neither Private Google Access nor Cloud NAT: without an external IP the "
        "VM has no network"
    )
    assert found.fix == (
        "gcloud compute networks subnets update default --region=us-central1 --project=my-project "
        "--enable-private-ip-google-access"
    )
    assert allowed(plan_of(), (found,)) == ()
    site.cloud.compute.zones.open_out("us-central1")
    assert check_vms(site.compute, plan_of()) == ()


def test_findings_only_warn_for_a_workstation(site: Site) -> None:
    site.cloud.compute.zones.firewalls.clear()
    reached, tunnel = check_vms(site.compute, work_plan())
    assert {reached.status, tunnel.status} == {"warning"}
    assert reached.fix.count("\n") == 2
    assert (
        "gcloud compute routers nats create launch-nat --router=launch-nat --region=us-central1 --project=my-project "
        "--auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges"
    ) in reached.fix
    assert tunnel.fix == (
        "gcloud compute firewall-rules create launch-iap-ssh --project=my-project --network=default "
        "--direction=INGRESS --allow=tcp:22 --source-ranges=35.235.240.0/20"
    )


def nodes_plan(**fields: Any) -> Plan:
    """Two nodes that train."""
    known = {"regions": ["us-central1"], "machine": {"type": "l4", "gpus": 1, "nodes": 2}, "provisioning": ["spot"]}
    return planned("vm", **{"output": "gs://my-bucket/runs", **known, **fields})


@pytest.mark.parametrize("external", [False, True])
def test_several_nodes_on_a_network_that_blocks_their_traffic(site: Site, external: bool) -> None:
    site.cloud.compute.zones.access("us-central1")
    plan = nodes_plan(vm={"external_ip": external})
    assert check_vms(site.compute, plan) == (), "the default network has default-allow-internal"
    site.cloud.compute.zones.firewalls.pop()
    [found] = check_vms(site.compute, plan)
    assert (found.status, found.place) == ("failed", "us-central1")
    assert found.fix == (
        "gcloud compute firewall-rules create launch-internal --project=my-project --network=default "
        "--direction=INGRESS --allow=tcp --source-ranges=10.128.0.0/20"
    )
    assert allowed(plan, (found,)) == ()


def test_several_nodes_on_a_named_subnetwork(site: Site) -> None:
    zones = site.cloud.compute.zones
    zones.subnetworks["us-central1", "mine"] = {
        "network": "projects/my-project/global/networks/own",
        "ipCidrRange": "192.168.0.0/24",
        "privateIpGoogleAccess": True,
    }
    [found] = check_vms(site.compute, nodes_plan(identity={"subnetwork": "mine"}))
    assert "--network=own " in found.fix
    assert "--source-ranges=192.168.0.0/24" in found.fix
    assert check_vms(site.compute, nodes_plan(identity={"subnetwork": "mine"}, machine={"type": "l4", "gpus": 1})) == ()


def test_unreadable_firewall_rules_are_unknown(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    site.cloud.compute.zones.firewalls.clear()
    site.cloud.faults.add(Fault("compute.firewalls.list", Status(403, message="Required permission"), times=99))
    [found] = check_vms(site.compute, nodes_plan())
    assert found.status == "unknown"
    assert found.text.startswith("not checked: firewall rules")


def test_with_an_external_ip_the_network_is_not_asked_about(site: Site) -> None:
    assert check_vms(site.compute, work_plan(vm={"external_ip": True})) == ()
    assert not any(word in one.path for one in site.cloud.requests for word in ("subnetworks", "routers", "firewalls"))


def test_a_missing_subnetwork(site: Site) -> None:
    plan = work_plan(identity={"subnetwork": "mine"})
    [found] = check_vms(site.compute, plan)
    assert (found.status, found.place) == ("failed", "us-central1")
    assert found.text.startswith("subnetwork mine does not exist in us-central1")


def test_a_missing_image_family(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    site.cloud.compute.zones.families.clear()
    [found] = check_vms(site.compute, plan_of())
    assert (found.status, found.place) == ("failed", "")
    assert "image family pytorch-2-9-cu129-ubuntu-2404-nvidia-580 does not exist in project deep" in found.text
    assert found.fix.startswith("gcloud compute images list --project=deeplearning-platform-release ")


def test_a_zone_without_the_machine_costs_only_that_zone(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    site.cloud.faults.add(Fault("compute.machineTypes.get", Status(404, message="The resource was not found")))
    findings = check_vms(site.compute, plan_of())
    [found] = findings
    assert (found.status, found.place in {one.zone for one in plan_of().attempts}) == ("failed", True)
    assert len(allowed(plan_of(), findings)) == len(plan_of().attempts) - 1


def test_a_quota_of_zero(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    for name in ("PREEMPTIBLE_NVIDIA_L4_GPUS", "NVIDIA_L4_GPUS"):
        site.cloud.compute.quotas.limit(name, 0, "us-central1")
    [found] = check_vms(site.compute, plan_of())
    assert (found.status, found.place, found.provisioning) == ("failed", "us-central1", "spot")
    assert "quota PREEMPTIBLE_NVIDIA_L4_GPUS in us-central1 is too low for spot: limit 0, 1 needed" in found.text
    assert "--quota-id=PREEMPTIBLE-NVIDIA-L4-GPUS-per-project-region --preferred-value=1 " in found.fix
    site.cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 8, "us-central1")
    assert check_vms(site.compute, plan_of()) == ()


def test_flex_start_needs_preemptible_quota(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    plan = plan_of(provisioning="flex-start")
    site.cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
    assert check_vms(site.compute, plan) == ()
    site.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1")
    [found] = check_vms(site.compute, plan)
    assert (found.status, found.place, found.provisioning) == ("failed", "us-central1", "flex-start")
    assert "--quota-id=PREEMPTIBLE-NVIDIA-L4-GPUS-per-project-region --preferred-value=1 " in found.fix


def test_an_exhausted_quota_is_reported(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    for name in ("PREEMPTIBLE_NVIDIA_L4_GPUS", "NVIDIA_L4_GPUS"):
        site.cloud.compute.quotas.limit(name, 1, "us-central1")
    site.launch()
    [found] = check_vms(site.compute, plan_of())
    assert (found.status, found.fix) == ("warning", "")
    assert found.text == "quota PREEMPTIBLE_NVIDIA_L4_GPUS in us-central1 is used up: 1 of 1 in use, 1 needed"


def test_a_quota_of_all_regions_refuses_all(site: Site) -> None:
    site.cloud.compute.zones.access("us-central1")
    site.cloud.compute.quotas.limit("GPUS_ALL_REGIONS", 1)
    [found] = check_vms(site.compute, plan_of(2))
    assert (found.status, found.place, found.provisioning) == ("failed", "", "")
    assert "--quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=3;" in found.fix
    assert allowed(plan_of(2), (found,)) == ()


def test_unreadable_parts_are_reported_in_one_line(site: Site) -> None:
    for name in ("regions", "subnetworks", "machineTypes", "projects", "images"):
        site.cloud.faults.add(Fault(f"compute.{name}.get", Status(403, message="Required permission"), times=99))
    site.cloud.faults.add(Fault("compute.images.getFromFamily", Reset(), times=99))
    [found] = check_vms(site.compute, plan_of())
    assert found.status == "unknown"
    assert found.text.startswith("not checked: quotas of the project, quotas of us-central1, subnetwork default of")
    assert found.text.endswith("(Compute Engine: Required permission)")
    assert allowed(plan_of(), (found,)) == plan_of().attempts


# --- In tables --------------------------------------------------------------------------------------------------------

ALL = {"network": "x/default", "nats": [{"sourceSubnetworkIpRangesToNat": "ALL_SUBNETWORKS_ALL_PRIMARY_IP_RANGES"}]}
LISTED = {
    "network": "x/default",
    "nats": [{"sourceSubnetworkIpRangesToNat": "LIST_OF_SUBNETWORKS", "subnetworks": [{"name": "x/default"}]}],
}
OTHERS = {**LISTED, "nats": [{**LISTED["nats"][0], "subnetworks": [{"name": "x/other"}]}]}  # type: ignore[dict-item]  # a text or a list of dicts
PRIVATE = {"privateIpGoogleAccess": True}


@pytest.mark.parametrize(
    ("subnetwork", "routers", "image", "status"),
    [
        (PRIVATE, [], IMAGE, None),
        (PRIVATE, [], "docker.io/library/python", "failed"),
        (PRIVATE, [], "gcr.io/my-project/train", None),
        (PRIVATE, [], None, "warning"),
        ({}, [ALL], IMAGE, None),
        ({}, [LISTED], None, None),
        ({}, [OTHERS], IMAGE, "failed"),
        ({}, [{**ALL, "network": "x/other"}], IMAGE, "failed"),
        ({}, [{"network": "x/default"}], None, "warning"),
        ({}, [], "docker.io/library/python", "failed"),
        (None, [], IMAGE, None),
        ({}, None, IMAGE, None),
    ],
)
def test_what_a_network_reaches(subnetwork: Any, routers: Any, image: str | None, status: str | None) -> None:
    found = check_outbound_access(NET, subnetwork, routers, image)
    assert (found and found.status) == status
    assert found is None or found.fix


def test_a_subnetwork_names_its_network() -> None:
    net = replace(NET, network="", subnetwork="default")
    assert check_outbound_access(net, {"network": "https://x/default"}, [ALL], None) is None
    found = check_outbound_access(net, {"network": "https://x/mine"}, [ALL], None)
    assert found
    assert "--network=mine" in found.fix


RULE = {
    "network": "x/default",
    "direction": "INGRESS",
    "sourceRanges": [IAP],
    "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}],
}


@pytest.mark.parametrize(
    ("fields", "admitted"),
    [
        ({}, True),
        ({"sourceRanges": ["10.0.0.0/8", "0.0.0.0/0"]}, True),
        ({"sourceRanges": ["35.235.240.0/24"]}, False),
        ({"sourceRanges": ["::/0"]}, False),
        ({"allowed": [{"IPProtocol": "all"}]}, True),
        ({"allowed": [{"IPProtocol": "tcp"}]}, True),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["20-25", "80"]}]}, True),
        ({"allowed": [{"IPProtocol": "tcp", "ports": ["80", "443"]}]}, False),
        ({"allowed": [{"IPProtocol": "udp"}]}, False),
        ({"direction": "EGRESS"}, False),
        ({"disabled": True}, False),
        ({"network": "x/other"}, False),
        ({"targetTags": ["web"]}, False),
        ({"targetServiceAccounts": ["me@x"]}, True),
        ({"targetServiceAccounts": ["other@x"]}, False),
    ],
)
def test_which_rules_let_iap_in(fields: dict[str, Any], admitted: bool) -> None:
    found = check_iap_ssh(NET, "default", [{**RULE, **fields}], "me@x")
    assert (found is None) is admitted


DENY = {"name": "deny", "network": "x/own", "direction": "INGRESS", "denied": [{"IPProtocol": "all"}]}
INSIDE = {
    "name": "inside",
    "network": "x/own",
    "direction": "INGRESS",
    "sourceRanges": ["10.0.0.0/8"],
    "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}],
}
PARTS = [[{"IPProtocol": "tcp", "ports": [span]}] for span in ("1024-30000", "30001-65535")]


@pytest.mark.parametrize(
    ("rules", "fix"),
    [
        ([INSIDE], None),
        ([{**INSIDE, "allowed": [{"IPProtocol": "all"}]}], None),
        ([{**INSIDE, "allowed": PARTS[0]}], "--source-ranges=10.1.0.0/16"),
        ([{**INSIDE, "allowed": PARTS[0]}, {**INSIDE, "allowed": PARTS[1]}], None),
        ([{**INSIDE, "allowed": [{"IPProtocol": "udp"}]}], "--source-ranges=10.1.0.0/16"),
        ([{**INSIDE, "sourceRanges": ["10.1.0.0/24"]}], "--source-ranges=10.1.0.0/16"),
        ([{**INSIDE, "sourceRanges": ["10.1.0.0/17", "10.1.128.0/17"]}], None),
        ([{**INSIDE, "sourceRanges": ["10.1.0.0/17", "10.1.192.0/18"]}], "--source-ranges=10.1.0.0/16"),
        ([{**INSIDE, "network": "x/other"}], "--network=own "),
        ([{**INSIDE, "disabled": True}], "launch-internal"),
        ([{**INSIDE, "targetTags": ["web"]}], "launch-internal"),
        ([{**INSIDE, "sourceRanges": [], "sourceTags": ["web"]}], "launch-internal"),
        ([{**INSIDE, "targetServiceAccounts": ["other@x"]}], "launch-internal"),
        ([{**INSIDE, "sourceRanges": [], "sourceServiceAccounts": ["me@x"]}], None),
        ([{**INSIDE, "sourceRanges": []}], None),
        ([INSIDE, DENY], "--priority=999"),
        ([{**INSIDE, "priority": 900}, DENY], None),
        ([INSIDE, {**DENY, "priority": 10, "sourceRanges": ["10.1.2.0/24"]}], "--priority=9"),
        ([INSIDE, {**DENY, "priority": 10, "sourceRanges": ["10.2.0.0/16"]}], None),
        ([INSIDE, {**DENY, "priority": 10, "targetTags": ["web"]}], None),
        ([INSIDE, {**DENY, "priority": 10, "denied": [{"IPProtocol": "tcp", "ports": ["22"]}]}], None),
        ([INSIDE, {**DENY, "direction": "EGRESS", "destinationRanges": ["10.0.0.0/8"]}], "--direction=EGRESS "),
        ([INSIDE, {**DENY, "direction": "EGRESS", "destinationRanges": ["8.8.8.0/24"]}], None),
        ([], "launch-internal"),
    ],
)
def test_which_rules_let_the_nodes_talk(rules: list[dict[str, Any]], fix: str | None) -> None:
    found = check_node_traffic(replace(NET, network="own"), "own", {"ipCidrRange": "10.1.0.0/16"}, rules, "me@x")
    assert (found is None) is (fix is None)
    assert found is None or (fix and fix in found.fix)


def test_a_deny_rule_before_the_one_for_iap() -> None:
    denies = {"name": "deny", "network": "x/default", "denied": [{"IPProtocol": "tcp"}], "priority": 5}
    found = check_iap_ssh(NET, "default", [RULE, denies], "me@x")
    assert found
    assert "--priority=4" in found.fix


@pytest.mark.parametrize(
    ("own", "other", "status"),
    [
        ((0, 0), None, "failed"),
        ((4, 0), None, None),
        ((4, 3), None, "warning"),
        ((1, 0), None, "failed"),
        ((0, 0), (8, 0), None),
        ((0, 0), (8, 7), "warning"),
        ((0, 0), (0, 0), "failed"),
        ((1, 0), (8, 0), "failed"),
        ((2, 1), (8, 0), "warning"),
        (None, None, None),
    ],
)
def test_quotas(own: Any, other: Any, status: str | None) -> None:
    pairs = {"SPOT_GPUS": own, "GPUS": other}
    quotas = [{"metric": name, "limit": one[0], "usage": one[1]} for name, one in pairs.items() if one]
    found = check_compute_quota_limit(
        QuotaNeed(metric="SPOT_GPUS", units=2, fallback="GPUS"), "spot", "us-central1", quotas
    )
    assert (found and found.status) == status


def test_the_attempts_to_which_a_check_applies() -> None:
    attempt, check = plan_of().attempts[0], Check(name="vm", status="failed", text="")
    assert check.applies_to(attempt)
    assert replace(check, place=str(attempt.zone), provisioning="spot").applies_to(attempt)
    assert not replace(check, place="us-central1", provisioning="standard").applies_to(attempt)
    assert not replace(check, place="us-east4").applies_to(attempt)
