"""Instances that Compute Engine refuses immediately."""

from __future__ import annotations

import copy
from datetime import UTC, datetime

import pytest
from google.api_core.exceptions import BadRequest, NotFound
from google.cloud import compute_v1

from launcher.testing.googlecloud import ApiError, FakeClock, GoogleCloud, parse_instance
from tests.googlecloud.conftest import Clients
from tests.googlecloud.test_compute import GOOD, ZONE, Change, insert, put, status

REFUSED: list[tuple[str, Change, str]] = [
    ("unknown", put(spot=True), "Unknown name \"spot\" at 'resource.scheduling'"),
    ("model", put(provisioningModel="CHEAP"), "provisioningModel': 'CHEAP'"),
    ("nic", lambda b: b["networkInterfaces"][0].update(nicType="FAST"), "nicType': 'FAST'"),
    ("live migration", lambda b: b["scheduling"].pop("onHostMaintenance"), "do not support live migration."),
    ("preemptible", put(preemptible=True, provisioningModel="STANDARD"), "only allowed provisioning_model"),
    ("restart", put(automaticRestart=True), "preemptible be false when AutomaticRestart is true"),
    ("on demand", put(provisioningModel="STANDARD"), "Machine type a3-highgpu-2g requires SPOT or FLEX_START."),
    ("no disk", lambda b: b.pop("disks"), "resource.disks"),
    ("no name", lambda b: b.pop("name"), "resource.name"),
    ("name", lambda b: b.update(name="Dev_1"), "Must be a match of regex"),
    (
        "accelerators on A3",
        lambda b: b.update(guestAccelerators=[{"acceleratorType": "nvidia-h100-80gb", "acceleratorCount": 2}]),
        "[nvidia-h100-80gb, a3-highgpu-2g] features are not compatible for creating instance.",
    ),
    (
        "disk",
        lambda b: b["disks"][0]["initializeParams"].update(diskType=f"zones/{ZONE}/diskTypes/pd-standard"),
        "Disk type pd-standard is not supported for machine type a3-highgpu-2g.",
    ),
    ("no action", lambda b: b["scheduling"].pop("instanceTerminationAction"), "You must specify instanceTermination"),
    ("stop", put(instanceTerminationAction="STOP"), "undefined value for `discard-local-ssd`"),
    ("flex", put(provisioningModel="FLEX_START"), "only allowed value is NO_RESERVATION"),
    ("too long", put(provisioningModel="FLEX_START", maxRunDuration={"seconds": "604801"}), "at most 604800 seconds"),
    ("short", put(maxRunDuration={"seconds": "29"}), "must be between 30 and 10368000 seconds"),
    (
        "reservation",
        lambda b: b.update(reservationAffinity={"consumeReservationType": "SPECIFIC_RESERVATION"}),
        "A reservation can't be consumed by a VM that is SPOT.",
    ),
    ("wait", lambda b: b.update(params={"requestValidForDuration": {"seconds": "90"}}), "only be set for FLEX_START"),
    ("label", lambda b: b["labels"].update(a="B"), "Label value 'B' violates format constraints."),
    (
        "metadata",
        lambda b: b["metadata"]["items"].append({"key": "launch", "value": "x" * 262145}),
        "'resource.metadata.items[1].value' is too large: maximum size 262144 character(s); actual size 262145.",
    ),
    (
        "all metadata",
        lambda b: b["metadata"]["items"].extend({"key": f"a{n}", "value": "x" * 200_000} for n in range(3)),
        "Metadata is too large",
    ),
    ("key", lambda b: b["metadata"]["items"].append({"key": "a b", "value": ""}), "metadata.items[1].key': 'a b'"),
    ("twice", lambda b: b["metadata"]["items"].extend([*b["metadata"]["items"]]), "Metadata has duplicate key"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_compute_engine_refuses(change: Change, message: str) -> None:
    body = copy.deepcopy(GOOD)
    change(body)
    with pytest.raises(ApiError) as caught:
        parse_instance(body)
    assert caught.value.code == 400
    assert message in caught.value.message


def reserved(model: str, name: str = "mine") -> compute_v1.Instance:
    """Return the body of a VM of a reservation."""
    body = copy.deepcopy(GOOD)
    body["machineType"] = f"zones/{ZONE}/machineTypes/a3-highgpu-8g"
    body["scheduling"]["provisioningModel"] = model
    key = "compute.googleapis.com/reservation-name"
    affinity = {"consumeReservationType": "SPECIFIC_RESERVATION", "key": key, "values": [name]}
    return parse_instance({**body, "reservationAffinity": affinity})


@pytest.mark.parametrize("kind", [{"deploymentType": "DENSE"}, {"reservationMode": "CALENDAR"}])
def test_a_dense_reservation_takes_bound_vms_alone(compute: Clients, cloud: GoogleCloud, kind: dict[str, str]) -> None:
    cloud.compute.zones.reservations[ZONE, "mine"] = {"status": "READY", **kind}
    with pytest.raises(BadRequest, match="DENSE reservations must use provisioningModel RESERVATION_BOUND"):
        insert(compute, reserved("STANDARD"))
    insert(compute, reserved("RESERVATION_BOUND"))


def test_vms_end_with_their_reservation(compute: Clients, cloud: GoogleCloud, clock: FakeClock) -> None:
    end = datetime.fromtimestamp(clock() + 600, UTC).isoformat()
    known = {"status": "READY", "deploymentType": "DENSE", "deleteAtTime": end}
    cloud.compute.zones.reservations[ZONE, "mine"] = known
    insert(compute, reserved("RESERVATION_BOUND"))
    clock.advance(590)
    assert status(compute) == "RUNNING"
    clock.advance(60)
    with pytest.raises(NotFound):
        status(compute)
