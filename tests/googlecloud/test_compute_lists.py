"""Lists over zones, filters, operations, machine types by zone, and faults in between, through Google's own clients."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import requests
from google.api_core.exceptions import BadRequest, Forbidden, GoogleAPICallError, NotFound, ServiceUnavailable

from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Pace, Reset, Status, Truncated
from tests.googlecloud.conftest import Clients
from tests.googlecloud.test_compute import WHERE, asked, insert, operation, status

EVERYWHERE = {"project": "my-project"}


def fleet(compute: Clients, **more: object) -> dict[str, list[str]]:
    """Return the VM names by zone. The client's own retries are off, because they wait by the real clock."""
    pages = compute.Instances.aggregated_list(request={**EVERYWHERE, **more}, retry=None)
    names: dict[str, list[str]] = {}
    for scope, found in pages:
        if found.instances:
            names.setdefault(scope, []).extend(one.name for one in found.instances)
    return names


def test_all_zones_are_listed_at_once(compute: Clients, cloud: GoogleCloud) -> None:
    for n, zone in enumerate(("us-central1-a", "us-east4-a", "us-central1-a")):
        insert(compute, asked(name=f"vm{n}", labels={"launch-run": f"r{n}"}), zone=zone)
    insert(compute, asked(name="theirs", labels={}), zone="us-east4-a")
    everything = {"zones/us-central1-a": ["vm0", "vm2"], "zones/us-east4-a": ["theirs", "vm1"]}
    assert fleet(compute) == everything
    assert fleet(compute, max_results=1) == everything
    assert fleet(compute, filter='labels.launch-run="r1"') == {"zones/us-east4-a": ["vm1"]}
    assert fleet(compute, filter="labels.launch-run=r0 AND name=vm0") == {"zones/us-central1-a": ["vm0"]}
    assert fleet(compute, filter="labels.launch-run:*")["zones/us-east4-a"] == ["vm1"]
    assert fleet(compute, filter="(name=vm0) (status=PROVISIONING)") == {"zones/us-central1-a": ["vm0"]}
    assert fleet(compute, filter="labels.launch-run=r9") == {}
    assert fleet(compute, filter="NOT labels.launch-run:*") == {"zones/us-east4-a": ["theirs"]}
    assert fleet(compute, filter="labels.launch-run!=r0 AND zone:us-central1-a") == {"zones/us-central1-a": ["vm2"]}
    assert [one.name for one in compute.Instances.list(request={**WHERE, "filter": 'name eq "vm[12]"'})] == ["vm2"]
    with pytest.raises(BadRequest, match="Invalid list filter expression"):
        fleet(compute, filter="name=vm0 OR name=vm1")


def test_a_zone_may_be_out_of_reach(compute: Clients, cloud: GoogleCloud) -> None:
    insert(compute)
    insert(compute, asked(name="away"), zone="us-east4-a")
    cloud.compute.unreachable.add("us-east4-a")
    with pytest.raises(ServiceUnavailable, match="zones/us-east4-a"):
        fleet(compute)
    link = f"{cloud.url}/compute/v1/projects/my-project/aggregated/instances"  # the client has no such parameter
    found = requests.get(link, params={"returnPartialSuccess": "true"}, timeout=10).json()
    assert found["unreachables"] == ["zones/us-east4-a"]
    assert found["items"]["zones/us-east4-a"]["warning"]["code"] == "UNREACHABLE"
    assert [one["name"] for one in found["items"]["zones/us-central1-a"]["instances"]] == ["dev"]
    assert found["items"]["zones/us-west1-a"]["warning"]["code"] == "NO_RESULTS_ON_PAGE"


def test_operations_are_found_by_their_target(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    begun = insert(compute)
    insert(compute, asked(name="other"))
    clock.advance(10)
    call = {**WHERE, "filter": f"targetId={begun.target_id}"}
    [found] = compute.ZoneOperations.list(request=call)
    assert (found.name, found.user, found.insert_time) == (
        begun.name,
        "you@example.com",
        "2023-11-14T22:13:20.000+00:00",
    )
    assert found.end_time == "2023-11-14T22:13:30.000+00:00"
    assert compute.ZoneOperations.wait(operation=begun.name, **WHERE).status.name == "DONE"
    with pytest.raises(NotFound, match="zones/us-central1-a/operations/x' was not found"):
        compute.ZoneOperations.get(operation="x", **WHERE)
    cloud.compute.forget_operations()
    assert not list(compute.ZoneOperations.list(request=call))


def test_by_the_real_clock_waiting_takes_a_moment() -> None:
    with GoogleCloud() as cloud:
        cloud.compute.pace = Pace().times(100)
        compute = Clients(cloud)
        begun = insert(compute)
        began = time.monotonic()
        assert compute.ZoneOperations.wait(operation=begun.name, **WHERE).status.name == "RUNNING"
        assert time.monotonic() - began >= cloud.compute.operations.moment > 0


def test_an_unknown_parameter_is_refused(compute: Clients, cloud: GoogleCloud) -> None:
    insert(compute)
    link = f"{cloud.url}/compute/v1/projects/my-project/zones/us-central1-a/instances/dev"
    refused = requests.get(link, params={"maxResults": "1"}, timeout=10)
    assert (refused.status_code, "'maxResults'" in refused.text) == (400, True)


def test_machines_are_where_they_are(compute: Clients) -> None:
    found = compute.MachineTypes.get(machine_type="a3-highgpu-2g", **WHERE)
    [gpus] = found.accelerators
    assert (found.guest_cpus, found.memory_mb, found.bundled_local_ssds.partition_count) == (52, 468 * 1024, 4)
    assert (gpus.guest_accelerator_type, gpus.guest_accelerator_count) == ("nvidia-h100-80gb", 2)
    with pytest.raises(NotFound, match="zones/us-central1-f/machineTypes/a3-highgpu-2g' was not found"):
        compute.MachineTypes.get(machine_type="a3-highgpu-2g", project="my-project", zone="us-central1-f")
    names = [one.name for one in compute.MachineTypes.list(**WHERE)]
    assert "g2-standard-4" in names
    assert "a4-highgpu-8g" not in names
    assert {one.name for one in compute.AcceleratorTypes.list(**WHERE)} >= {"nvidia-h100-80gb", "nvidia-tesla-t4"}
    assert compute.AcceleratorTypes.get(accelerator_type="nvidia-l4", **WHERE).maximum_cards_per_instance == 8
    everywhere = compute.AcceleratorTypes.aggregated_list(project="my-project")
    with_b200 = {zone for zone, found in everywhere for one in found.accelerator_types if one.name == "nvidia-b200"}
    assert "zones/us-central1-b" in with_b200
    assert "zones/us-central1-a" not in with_b200


def test_zones_and_regions_are_those_that_there_are(compute: Clients) -> None:
    zone = compute.Zones.get(**WHERE)
    assert (zone.status, zone.region.rpartition("/")[2]) == ("UP", "us-central1")
    with pytest.raises(NotFound):
        compute.Zones.get(project="my-project", zone="us-central1-z")
    with pytest.raises(NotFound):
        compute.Regions.get(project="my-project", region="us-nowhere1")
    zones = {one.name for one in compute.Zones.list(project="my-project")}
    assert {"us-central1-f", "us-east1-d"} <= zones
    assert "us-east1-a" not in zones
    assert "europe-west4" in {one.name for one in compute.Regions.list(project="my-project")}


def test_images_are_found_by_their_family(compute: Clients) -> None:
    family = {"project": "deeplearning-platform-release", "family": "pytorch-2-9-cu129-ubuntu-2404-nvidia-580"}
    found = compute.Images.get_from_family(**family)
    assert found.family == family["family"]
    assert compute.Images.get(project=family["project"], image=found.name).name == found.name
    with pytest.raises(NotFound, match="global/images/family/none' was not found"):
        compute.Images.get_from_family(project=family["project"], family="none")
    with pytest.raises(NotFound, match="projects/elsewhere' was not found"):
        compute.Images.get_from_family(project="elsewhere", family="x")


def test_what_a_vm_without_an_external_ip_reaches(compute: Clients, cloud: GoogleCloud) -> None:
    where = {"project": "my-project", "region": "us-central1"}
    default = {**where, "subnetwork": "default"}
    assert not compute.Subnetworks.get(**default).private_ip_google_access
    assert not list(compute.Routers.list(**where))
    cloud.compute.zones.access("us-central1")
    cloud.compute.zones.open_out("us-central1")
    assert compute.Subnetworks.get(**default).private_ip_google_access
    [router] = compute.Routers.list(**where)
    assert router.nats[0].source_subnetwork_ip_ranges_to_nat == "ALL_SUBNETWORKS_ALL_IP_RANGES"
    everywhere = dict(compute.Routers.aggregated_list(project="my-project"))
    assert [one.name for one in everywhere["regions/us-central1"].routers] == ["router"]
    rule, _internal = compute.Firewalls.list(project="my-project")
    assert (list(rule.source_ranges), list(rule.allowed[0].ports)) == (["0.0.0.0/0"], ["22"])
    assert compute.Networks.get(project="my-project", network="default").auto_create_subnetworks
    with pytest.raises(NotFound, match="global/networks/other' was not found"):
        compute.Networks.get(project="my-project", network="other")


def test_advice_says_where_spot_vms_are_to_be_had(compute: Clients, cloud: GoogleCloud) -> None:
    cloud.compute.zones.scores.update({"us-central1-a": 0.2, "us-central1-b": 0.9})
    selections = {"one": {"machine_types": ["a3-highgpu-2g"]}}
    policy = {"zones": [{"zone": f"zones/us-central1-{letter}"} for letter in "ab"], "target_shape": "ANY_SINGLE_ZONE"}
    asked_for = {
        "size": 1,
        "instance_properties": {"scheduling": {"provisioning_model": "SPOT"}},
        "instance_flexibility_policy": {"instance_selections": selections},
        "distribution_policy": policy,
    }
    call = {"project": "my-project", "region": "us-central1", "capacity_advice_request_resource": asked_for}
    found = compute.Advice.capacity(request=call).recommendations
    best = [(one.shards[0].zone.rpartition("/")[2], one.scores.obtainability) for one in found]
    assert best == [("us-central1-b", 0.9), ("us-central1-a", 0.2)]
    asked_for["instance_properties"] = {"scheduling": {"provisioning_model": "STANDARD"}}
    with pytest.raises(BadRequest, match="SPOT only"):
        compute.Advice.capacity(request=call)


def test_a_permission_is_missing(compute: Clients, cloud: GoogleCloud) -> None:
    insert(compute)
    cloud.compute.deny("compute.instances.delete")
    with pytest.raises(Forbidden, match=r"Required 'compute\.instances\.delete' permission for 'projects/my-project"):
        compute.Instances.delete_unary(instance="dev", **WHERE)
    asked_about = {"permissions": ["compute.instances.delete", "compute.instances.get"]}
    call = {**WHERE, "resource": "dev", "test_permissions_request_resource": asked_about}
    assert compute.Instances.test_iam_permissions(request=call).permissions == ["compute.instances.get"]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("compute.instances.get", lambda client: client.Instances.get(instance="dev", **WHERE, retry=None)),
        ("compute.instances.delete", lambda client: client.Instances.delete_unary(instance="dev", **WHERE, retry=None)),
        ("compute.instances.list", lambda client: list(client.Instances.list(**WHERE, retry=None))),
        ("compute.zoneOperations.list", lambda client: list(client.ZoneOperations.list(**WHERE, retry=None))),
        ("compute.zoneOperations.wait", lambda client: client.ZoneOperations.wait(operation="x", **WHERE, retry=None)),
        ("compute.machineTypes.get", lambda client: client.MachineTypes.get(machine_type="x", **WHERE, retry=None)),
    ],
)
def test_every_request_has_its_faults(
    compute: Clients, cloud: GoogleCloud, name: str, call: Callable[[Clients], object]
) -> None:
    insert(compute)
    refused = cloud.faults.add(Fault(name, Status(403, reason="forbidden")))
    with pytest.raises(Forbidden) as caught:
        call(compute)
    assert caught.value.errors[0]["reason"] == "forbidden"
    half = cloud.faults.add(Fault(name, Truncated()))
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError, GoogleAPICallError)):
        call(compute)
    assert (cloud.faults.used[refused], cloud.faults.used[half]) == (1, 1)


def test_faults_meet_vms_by_their_names(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    lost = cloud.faults.add(Fault("compute.instances.insert", Reset("after"), name="^dev$"))
    cloud.faults.add(Fault("compute.zoneOperations.get", Status(403, reason="forbidden", message="no"), times=1))
    first = "11111111-1111-4111-8111-111111111111"
    other = insert(compute, asked(name="other"))
    with pytest.raises(requests.ConnectionError):
        insert(compute, request_id=first)
    assert (cloud.faults.used[lost], status(compute)) == (1, "PROVISIONING")
    assert insert(compute, request_id=first).operation_type == "insert"
    with pytest.raises(Exception, match="no"):
        operation(compute, other)
    assert operation(compute, other).status.name == "RUNNING"
    cloud.faults.add(Fault("compute.instances.aggregatedList", Status(503), times=None))
    with pytest.raises(ServiceUnavailable):
        fleet(compute)
