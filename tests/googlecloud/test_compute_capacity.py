"""Stockouts, quotas, bulkInsert and waiting for capacity, through Google's own clients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Forbidden, NotFound
from google.cloud import compute_v1

from launcher.testing.googlecloud import ApiError, FakeClock, GoogleCloud, parse_bulk
from tests.googlecloud.conftest import Clients
from tests.googlecloud.test_compute import GOOD, WHERE, ZONE, Change, asked, insert, operation, put, status

L4 = {"machineType": f"zones/{ZONE}/machineTypes/g2-standard-24"}


def on_demand(name: str = "dev", **more: Any) -> Any:
    """Return the body of a VM with two L4s."""
    return asked(put(provisioningModel="STANDARD"), name=name, **L4, **more)


def test_a_stockout_names_where_there_is_room(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    """The insert is accepted; its operation fails later, and the VM is deleted."""
    cloud.compute.capacity.out("us-central1-*", "a3-*", "SPOT", available=("us-east4-a", "us-east5-a"))
    begun = insert(compute)
    assert status(compute) == "PROVISIONING"
    clock.advance(5)
    failed = operation(compute, begun)
    [error] = failed.error.errors
    assert (failed.status.name, failed.http_error_status_code) == ("DONE", 503)
    assert error.code == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert error.message == (
        "The zone 'projects/my-project/zones/us-central1-a' does not have enough resources available to fulfill the "
        "request.  '(resource type:compute)'."
    )
    [info] = [detail.error_info for detail in error.error_details if detail.error_info.reason]
    assert (info.reason, info.metadatas["zonesAvailable"]) == ("resource_availability", "us-east4-a,us-east5-a")
    assert info.metadatas["vmType"] == "a3-highgpu-2g"
    with pytest.raises(NotFound):
        status(compute)
    insert(compute, on_demand())
    cloud.compute.capacity.back()
    insert(compute, asked(name="spot"))
    clock.advance(10)
    assert (status(compute), status(compute, "spot")) == ("RUNNING", "RUNNING")


def flex(wait: int = 600) -> Any:
    """Return the body of a flex-start VM, which waits for capacity."""

    def change(body: dict[str, Any]) -> None:
        body["scheduling"]["provisioningModel"] = "FLEX_START"
        body["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
        body["params"] = {"requestValidForDuration": {"seconds": str(wait)}}

    return asked(change)


@pytest.mark.parametrize("comes", ["in time", "when its end is known", "never"])
def test_flex_start_waits_for_capacity(compute: Clients, cloud: GoogleCloud, clock: FakeClock, comes: str) -> None:
    cloud.compute.capacity.out(until=clock() + 300 if comes == "when its end is known" else None)
    begun = insert(compute, flex())
    clock.advance(299)
    assert (status(compute), operation(compute, begun).status.name) == ("PENDING", "RUNNING")
    if comes == "in time":
        cloud.compute.capacity.back()
    clock.advance(2)
    assert status(compute) == ("PENDING" if comes == "never" else "PROVISIONING")
    clock.advance(299)
    if comes == "never":
        assert operation(compute, begun).error.errors[0].code.startswith("ZONE_RESOURCE_POOL_EXHAUSTED")
        with pytest.raises(NotFound):
            status(compute)
    else:
        assert (status(compute), operation(compute, begun).status.name) == ("RUNNING", "DONE")


def test_a_quota_is_refused_at_once(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 3, "us-central1")
    insert(compute, on_demand("elsewhere"), zone="us-east4-a")
    insert(compute, on_demand())
    with pytest.raises(Forbidden) as caught:
        insert(compute, on_demand("other"))
    [reason] = caught.value.errors
    assert (reason["reason"], reason["domain"]) == ("quotaExceeded", "usageLimits")
    assert caught.value.message.endswith("Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 3.0 in region us-central1.")
    assert cloud.compute.names() == ["elsewhere", "dev"]
    shown = {
        one.metric: (one.limit, one.usage)
        for one in compute.Regions.get(project="my-project", region="us-central1").quotas
    }
    assert shown["NVIDIA_L4_GPUS"] == (3, 2)
    assert shown["PREEMPTIBLE_NVIDIA_L4_GPUS"] == (1000, 0)
    compute.Instances.delete_unary(instance="dev", **WHERE)
    clock.advance(15)
    insert(compute, on_demand("other"))


def test_a_quota_is_refused_by_the_operation(compute: Clients, cloud: GoogleCloud) -> None:
    cloud.compute.quotas.limit("GPUS_PER_GPU_FAMILY", 0, "us-central1", late=True)
    whole = {"machineType": f"zones/{ZONE}/machineTypes/a3-highgpu-8g"}
    begun = insert(compute, asked(put(provisioningModel="STANDARD"), **whole))
    failed = operation(compute, begun)
    [error] = failed.error.errors
    assert (error.code, failed.http_error_status_code) == ("QUOTA_EXCEEDED", 403)
    [quota] = [detail.quota_info for detail in error.error_details]
    assert (quota.metric_name, quota.limit) == ("compute.googleapis.com/gpus_per_gpu_family", 0)
    assert dict(quota.dimensions) == {"region": "us-central1"}
    assert cloud.compute.names() == []


def bulk(count: int = 3, change: Change = lambda body: None, **more: Any) -> Any:
    """Return the body of a bulkInsert: all VMs or none."""
    properties = {name: value for name, value in copy.deepcopy(GOOD).items() if name != "name"}
    properties["machineType"] = "a3-highgpu-2g"
    names: dict[str, Any] = {f"r-n{n}": {} for n in range(count)}
    body = {
        "count": str(count),
        "minCount": str(count),
        "perInstanceProperties": names,
        "instanceProperties": properties,
    }
    body |= more
    change(body)
    return parse_bulk(body)


def insert_all(compute: Clients, body: Any = None, **more: Any) -> Any:
    """Return the operation."""
    request = compute_v1.BulkInsertInstanceRequest(
        bulk_insert_instance_resource_resource=body or bulk(), **{**WHERE, **more}
    )
    return compute.Instances.bulk_insert_unary(request=request)


def test_several_are_made_at_once(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    begun = insert_all(compute, request_id="11111111-1111-4111-8111-111111111111")
    assert insert_all(compute, request_id="11111111-1111-4111-8111-111111111111").name == begun.name
    clock.advance(10)
    done = operation(compute, begun)
    [made] = done.instances_bulk_insert_operation_metadata.per_location_status.values()
    assert (done.operation_type, done.status.name, made.created_vm_count) == ("bulkInsert", "DONE", 3)
    assert [status(compute, name) for name in ("r-n0", "r-n1", "r-n2")] == ["RUNNING"] * 3
    group = f'operationGroupId="{begun.operation_group_id}"'
    every = compute.ZoneOperations.list(request={**WHERE, "filter": group})
    assert sorted(one.operation_type for one in every) == ["bulkInsert", "insert", "insert", "insert"]


def test_none_is_left_of_too_few(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    cloud.compute.capacity.out(left=2)
    begun = insert_all(compute)
    clock.advance(5)
    failed = operation(compute, begun)
    assert [error.code for error in failed.error.errors] == [
        "VM_MIN_COUNT_NOT_REACHED",
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    ]
    assert failed.error.errors[0].message == "Requested minimum count of 3 VMs could not be created."
    [status_] = failed.instances_bulk_insert_operation_metadata.per_location_status.values()
    counts = (status_.target_vm_count, status_.created_vm_count, status_.failed_to_create_vm_count)
    assert (*counts, status_.deleted_vm_count) == (3, 2, 1, 2)
    clock.advance(15)
    assert cloud.compute.names() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.pop("count"), "resource.count"),
        (lambda b: b.update(perInstanceProperties={}), "resource.namePattern"),
        (lambda b: b.update(count="2", minCount="2"), "There must be 2 of them"),
        (lambda b: b.update(minCount="4"), "at most count, 3"),
        (
            lambda b: b["instanceProperties"].update(machineType=f"zones/{ZONE}/machineTypes/a3-highgpu-2g"),
            "Instance properties must provide existing machine type.",
        ),
        (lambda b: b["instanceProperties"].update(params={}), 'Unknown name "params"'),
    ],
)
def test_what_is_refused_of_several(change: Change, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        bulk(change=change)


def test_a_zone_must_have_the_machine(compute: Clients) -> None:
    with pytest.raises(BadRequest, match="'a4-highgpu-8g' does not exist in zone 'us-central1-a'"):
        insert(compute, asked(machineType=f"zones/{ZONE}/machineTypes/a4-highgpu-8g", disks=[{"boot": True}]))
    with pytest.raises(BadRequest, match=r"field 'zone': 'us-nowhere1-a'\. Unknown zone\."):
        insert(compute, zone="us-nowhere1-a")
