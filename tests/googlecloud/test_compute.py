"""Compute Engine's VMs on loopback, through Google's own clients: accepted and refused requests, and a VM's life."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.exceptions import Conflict, PreconditionFailed
from google.cloud import compute_v1

from launcher.testing.googlecloud import FakeClock, parse_instance
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


def put(**scheduling: Any) -> Change:
    return lambda body: body["scheduling"].update(scheduling)
