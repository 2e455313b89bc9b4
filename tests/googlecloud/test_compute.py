"""Compute Engine on loopback, through Google's own client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.api_core.exceptions import Conflict, NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1

from tests.googlecloud import ApiError, GoogleCloud, parse_instance

WHERE = {"project": "my-project", "zone": "us-central1-a"}
GOOD: dict[str, Any] = {
    "name": "dev",
    "machineType": "zones/us-central1-a/machineTypes/a3-highgpu-2g",
    "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"diskSizeGb": "200"}}],
    "networkInterfaces": [{"network": "global/networks/default", "nicType": "GVNIC"}],
    "scheduling": {
        "provisioningModel": "SPOT",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
        "maxRunDuration": {"seconds": "3600"},
    },
}


def test_an_instance_is_made_once(cloud: GoogleCloud) -> None:
    options = {"credentials": AnonymousCredentials(), "client_options": ClientOptions(api_endpoint=cloud.url)}
    instances = compute_v1.InstancesClient(**options)
    operation = instances.insert_unary(instance_resource=parse_instance(GOOD), **WHERE)
    assert compute_v1.ZoneOperationsClient(**options).wait(operation=operation.name, **WHERE).status.name == "DONE"
    assert instances.get(instance="dev", **WHERE).machine_type == GOOD["machineType"]
    assert [instance.name for instance in instances.list(**WHERE)] == ["dev"]
    assert compute_v1.ZonesClient(**options).get(**WHERE).status == "UP"
    with pytest.raises(Conflict, match="already exists"):
        instances.insert_unary(instance_resource=parse_instance(GOOD), **WHERE)
    with pytest.raises(NotFound, match="was not found"):
        instances.get(instance="other", **WHERE)


Change = Callable[[dict[str, Any]], Any]
REFUSED: list[tuple[str, Change, str]] = [
    ("unknown", lambda b: b["scheduling"].update(spot=True), "Unknown name \"spot\" at 'resource.scheduling'"),
    (
        "model",
        lambda b: b["scheduling"].update(provisioningModel="CHEAP"),
        "provisioningModel': 'CHEAP'",
    ),
    ("nic", lambda b: b["networkInterfaces"][0].update(nicType="FAST"), "nicType': 'FAST'"),
    ("live migration", lambda b: b["scheduling"].pop("onHostMaintenance"), "do not support live migration."),
    (
        "preemptible",
        lambda b: b["scheduling"].update(preemptible=True, provisioningModel="STANDARD"),
        "only allowed provisioning_model",
    ),
    ("no disk", lambda b: b.pop("disks"), "resource.disks"),
    (
        "accelerators on A3",
        lambda b: b.update(guestAccelerators=[{"acceleratorType": "nvidia-h100-80gb", "acceleratorCount": 2}]),
        "[nvidia-h100-80gb, a3-highgpu-2g] features are not compatible for creating instance.",
    ),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_compute_engine_refuses(change: Change, message: str) -> None:
    body = copy.deepcopy(GOOD)
    change(body)
    with pytest.raises(ApiError) as caught:
        parse_instance(body)
    assert caught.value.code == 400
    assert message in caught.value.message


def test_json_names_with_acronyms_are_known() -> None:
    body = copy.deepcopy(GOOD)
    body["networkInterfaces"][0].update(networkIP="10.0.0.2", accessConfigs=[{"natIP": "1.2.3.4"}])
    assert parse_instance(body).network_interfaces[0].network_i_p == "10.0.0.2"
