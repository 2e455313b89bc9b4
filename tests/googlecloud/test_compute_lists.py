"""Lists over zones, filters, operations, machine types by zone, and faults in between, through Google's own clients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests
from google.api_core.exceptions import BadRequest, Forbidden, GoogleAPICallError, NotFound, ServiceUnavailable

from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status, Truncated
from tests.googlecloud.conftest import Clients
from tests.googlecloud.test_compute import WHERE, asked, insert

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
    rule, _internal = compute.Firewalls.list(project="my-project")
    assert (list(rule.source_ranges), list(rule.allowed[0].ports)) == (["0.0.0.0/0"], ["22"])
    assert compute.Networks.get(project="my-project", network="default").auto_create_subnetworks
    with pytest.raises(NotFound, match="global/networks/other' was not found"):
        compute.Networks.get(project="my-project", network="other")


def test_a_permission_is_missing(compute: Clients, cloud: GoogleCloud) -> None:
    insert(compute)
    cloud.compute.deny("compute.instances.delete")
    with pytest.raises(Forbidden, match=r"Required 'compute\.instances\.delete' permission for 'projects/my-project"):
        compute.Instances.delete_unary(instance="dev", **WHERE)


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
