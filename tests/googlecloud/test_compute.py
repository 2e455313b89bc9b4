"""Compute Engine's VMs on loopback, through Google's own clients: accepted and refused requests, and a VM's life."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.exceptions import BadRequest, Conflict, NotFound, PreconditionFailed
from google.cloud import compute_v1

from launcher.testing.googlecloud import FakeClock, GoogleCloud, parse_instance
from tests.googlecloud.conftest import Clients

ZONE = "us-central1-a"
WHERE = {"project": "my-project", "zone": ZONE}
GOOD: dict[str, Any] = {
    "name": "dev",
    "machineType": "zones/us-central1-a/machineTypes/a3-highgpu-2g",
    "labels": {"launch-run": "dev"},
    "disks": [
        {
            "boot": True,
            "autoDelete": True,
            "initializeParams": {"diskSizeGb": "200", "diskType": f"zones/{ZONE}/diskTypes/pd-balanced"},
        }
    ],
    "networkInterfaces": [{"network": "global/networks/default", "nicType": "GVNIC"}],
    "serviceAccounts": [{"email": "dev@my-project.iam.gserviceaccount.com"}],
    "metadata": {"items": [{"key": "enable-guest-attributes", "value": "TRUE"}]},
    "scheduling": {
        "provisioningModel": "SPOT",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": {"seconds": "3600"},
    },
}
Change = Callable[[dict[str, Any]], Any]


def asked(change: Change = lambda body: None, **more: Any) -> compute_v1.Instance:
    """Return the body of a Spot VM with two H100s, with changes."""
    body = {**copy.deepcopy(GOOD), **more}
    change(body)
    return parse_instance(body)


def insert(compute: Clients, body: Any = None, **more: Any) -> Any:
    """Return the operation."""
    request = compute_v1.InsertInstanceRequest(instance_resource=body or asked(), **{**WHERE, **more})
    return compute.Instances.insert_unary(request=request)


def status(compute: Clients, name: str = "dev") -> str:
    return str(compute.Instances.get(instance=name, **WHERE).status)


def operation(compute: Clients, one: Any) -> Any:
    return compute.ZoneOperations.get(operation=one.name, **WHERE)


def kinds(compute: Clients, number: int) -> list[str]:
    """Return the operations on a VM, oldest first."""
    found = compute.ZoneOperations.list(request={**WHERE, "filter": f"targetId={number}"})
    return [one.operation_type for one in found]


def test_an_instance_is_made_in_steps(compute: Clients, clock: FakeClock) -> None:
    begun = insert(compute)
    seen = [(begun.status.name, status(compute))]
    for _ in range(2):
        clock.advance(5)
        seen.append((operation(compute, begun).status.name, status(compute)))
    assert seen == [("RUNNING", "PROVISIONING"), ("RUNNING", "STAGING"), ("DONE", "RUNNING")]
    done = compute.ZoneOperations.wait(operation=begun.name, **WHERE)
    made = compute.Instances.get(instance="dev", **WHERE)
    assert (done.operation_type, done.target_id, done.progress) == ("insert", made.id, 100)
    assert not done.error.errors
    assert made.machine_type.endswith("/projects/my-project/zones/us-central1-a/machineTypes/a3-highgpu-2g")
    assert made.last_start_timestamp == "2023-11-14T22:13:25.000+00:00"
    assert [disk.type_ for disk in made.disks] == ["PERSISTENT", *["SCRATCH"] * 4]
    assert made.network_interfaces[0].network_i_p
    assert compute.Instances.get(instance=str(made.id), **WHERE).name == "dev"
    assert [one.name for one in compute.Instances.list(**WHERE)] == ["dev"]


def test_the_same_request_makes_nothing_twice(compute: Clients, clock: FakeClock) -> None:
    one = "11111111-1111-4111-8111-111111111111"
    first = insert(compute, request_id=one)
    clock.advance(3599)
    assert insert(compute, request_id=one).name == first.name
    with pytest.raises(Conflict, match="used for a different request"):
        insert(compute, asked(name="other"), request_id=one)
    clock.advance(1)  # the hour in which a request id is remembered has passed
    with pytest.raises(Conflict, match="instances/dev' already exists"):
        insert(compute, request_id=one)
    assert len(list(compute.Instances.list(**WHERE))) == 1


def test_a_vm_is_stopped_started_and_deleted(compute: Clients, clock: FakeClock) -> None:
    number = insert(compute, asked(lambda body: body["scheduling"].pop("maxRunDuration"))).target_id
    with pytest.raises(BadRequest, match="is not ready"):
        compute.Instances.stop_unary(request={**WHERE, "instance": "dev", "discard_local_ssd": True})
    clock.advance(10)
    with pytest.raises(BadRequest, match="undefined value for `discard-local-ssd`"):
        compute.Instances.stop_unary(instance="dev", **WHERE)
    compute.Instances.stop_unary(request={**WHERE, "instance": "dev", "discard_local_ssd": True})
    assert status(compute) == "STOPPING"
    clock.advance(20)
    stopped = compute.Instances.get(instance="dev", **WHERE)
    assert (stopped.status, stopped.last_stop_timestamp) == ("TERMINATED", "2023-11-14T22:13:50.000+00:00")
    again = compute.Instances.stop_unary(instance="dev", **WHERE)
    assert again.status.name == "DONE"
    begun = compute.Instances.start_unary(instance="dev", **WHERE)
    clock.advance(10)
    assert (status(compute), operation(compute, begun).status.name) == ("RUNNING", "DONE")
    gone = compute.Instances.delete_unary(instance=str(number), **WHERE)
    clock.advance(15)
    assert operation(compute, gone).status.name == "DONE"
    with pytest.raises(NotFound):
        status(compute)
    with pytest.raises(NotFound):
        compute.Instances.delete_unary(instance="dev", **WHERE)
    assert kinds(compute, number) == ["insert", "stop", "stop", "start", "delete"]


def test_google_ends_a_vm_after_its_time(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    number = insert(compute).target_id
    clock.advance(3609)
    assert status(compute) == "RUNNING"
    ends = cloud.compute.vm("dev").body["resourceStatus"]["scheduling"]["terminationTimestamp"]
    assert ends == "2023-11-14T23:13:30.000+00:00"
    clock.advance(1)
    assert status(compute) == "STOPPING"
    clock.advance(20)
    with pytest.raises(NotFound):
        status(compute)
    [last] = [one for one in compute.ZoneOperations.list(**WHERE) if one.operation_type == "delete"]
    assert (last.user, last.target_id) == ("system", number)


def test_a_spot_vm_is_taken_away_with_a_notice(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    number = insert(compute).target_id
    clock.advance(10)
    cloud.compute.preempt("dev")
    assert (status(compute), cloud.compute.vm("dev").preempted) == ("STOPPING", True)
    clock.advance(29)
    assert status(compute) == "STOPPING"
    clock.advance(1)
    with pytest.raises(NotFound):
        status(compute)
    assert kinds(compute, number) == ["insert", "compute.instances.preempted", "delete"]


@pytest.mark.parametrize("action", ["STOP", "DELETE"])
def test_a_spot_vm_is_taken_away_while_it_is_made(
    compute: Clients, cloud: GoogleCloud, clock: FakeClock, action: str
) -> None:
    """With STOP the VM is left stopped and keeps its name."""

    def change(body: dict[str, Any]) -> None:
        body["scheduling"] |= {
            "instanceTerminationAction": action,
            "onInstanceStopAction": {"discardLocalSsd": True},
        }

    begun = insert(compute, asked(change))
    clock.advance(5)
    cloud.compute.preempt("dev")
    failed = operation(compute, begun)
    assert [error.code for error in failed.error.errors] == ["UNSUPPORTED_OPERATION"]
    assert cloud.compute.names() == (["dev"] if action == "STOP" else [])


def test_a_host_breaks(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    again = asked(
        lambda body: body["scheduling"].update(
            provisioningModel="STANDARD", automaticRestart=True, maxRunDuration={"seconds": "60"}
        ),
        name="again",
        machineType=f"zones/{ZONE}/machineTypes/g2-standard-4",
    )
    numbers = [insert(compute).target_id, insert(compute, again).target_id]
    clock.advance(10)
    for name in ("dev", "again"):
        cloud.compute.host_error(name)
    assert (status(compute), status(compute, "again")) == ("TERMINATED", "PROVISIONING")
    clock.advance(10)
    assert status(compute, "again") == "RUNNING"
    assert kinds(compute, numbers[0])[1:] == ["compute.instances.hostError"]
    assert kinds(compute, numbers[1])[2:] == ["compute.instances.automaticRestart"]


def test_metadata_is_set_by_who_has_read_it(compute: Clients) -> None:
    insert(compute)
    known = compute.Instances.get(instance="dev", **WHERE).metadata
    known.items.append(compute_v1.Items(key="launch-lease-until", value="5"))
    call = {**WHERE, "instance": "dev", "metadata_resource": known}
    assert compute.Instances.set_metadata_unary(request=call).status.name == "DONE"
    now = compute.Instances.get(instance="dev", **WHERE).metadata
    assert {item.key: item.value for item in now.items}["launch-lease-until"] == "5"
    with pytest.raises(PreconditionFailed, match="does not match current metadata fingerprint"):
        compute.Instances.set_metadata_unary(request=call)


def test_a_disk_goes_with_its_vm_or_is_left(compute: Clients, clock: FakeClock) -> None:
    insert(compute)
    insert(compute, asked(lambda body: body["disks"][0].update(autoDelete=False), name="kept"))
    clock.advance(10)
    with pytest.raises(BadRequest, match=r"already being used by 'projects/.*/instances/kept'"):
        compute.Disks.delete_unary(disk="kept", **WHERE)
    for name in ("dev", "kept"):
        compute.Instances.delete_unary(instance=name, **WHERE)
    clock.advance(15)
    assert [(disk.name, disk.size_gb, list(disk.users)) for disk in compute.Disks.list(**WHERE)] == [("kept", 200, [])]
    with pytest.raises(Conflict, match="disks/kept' already exists"):
        insert(compute, asked(name="kept"))
    compute.Disks.delete_unary(disk="kept", **WHERE)
    assert not list(compute.Disks.list(**WHERE))


def put(**scheduling: Any) -> Change:
    return lambda body: body["scheduling"].update(scheduling)
