"""The Instance: what each machine and each way of getting it needs."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import PlanRefused
from tests.googlecloud.compute import parse_instance
from tests.plan.planning import planned, request

WORKPLACE = {"training": False}


def vm(**fields: Any) -> dict[str, Any]:
    """A VM to work on: two L4s unless something else is said."""
    known = {"machine": {"type": "l4", "gpus": 2}, "provisioning": ["standard"]}
    return request("vm", world=WORKPLACE, **{**known, **fields})


def test_a_workplace() -> None:
    body = vm()
    assert body["name"] == "job"
    assert body["machineType"] == "zones/us-central1-a/machineTypes/g2-standard-24"
    assert "guestAccelerators" not in body
    assert body["networkInterfaces"] == [{"network": "global/networks/default", "nicType": "GVNIC"}]
    assert body["shieldedInstanceConfig"]["enableVtpm"]
    assert body["scheduling"] == {
        "provisioningModel": "STANDARD",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": True,
        "maxRunDuration": {"seconds": "43200"},
        "instanceTerminationAction": "STOP",
    }
    assert {"key": "enable-oslogin", "value": "TRUE"} in body["metadata"]["items"]
    parse_instance(body)


def test_spot() -> None:
    scheduling = vm(provisioning=["spot"])["scheduling"]
    assert scheduling["provisioningModel"] == "SPOT"
    assert scheduling["preemptible"] is True
    assert scheduling["automaticRestart"] is False


def test_flex_start() -> None:
    body = vm(machine={"type": "h100", "gpus": 2}, provisioning=["flex-start"], limits={"wait": "30m", "hours": 5})
    assert body["params"] == {"requestValidForDuration": {"seconds": "1800"}}
    assert body["scheduling"]["maxRunDuration"] == {"seconds": "18000"}
    assert body["scheduling"]["automaticRestart"] is False
    assert body["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}


@pytest.mark.parametrize(
    ("gpu", "model"), [("a100-80gb", "STANDARD"), ("h200", "RESERVATION_BOUND")], ids=["on demand too", "bound"]
)
def test_reservation(gpu: str, model: str) -> None:
    name = "reservation:projects/my-project/zones/us-central1-a/reservations/r"
    body = vm(machine={"type": gpu, "gpus": 8}, provisioning=[name], regions=None)
    assert body["scheduling"]["provisioningModel"] == model
    assert body["reservationAffinity"]["values"] == ["r"]
    shared = vm(machine={"type": gpu, "gpus": 8}, provisioning=[name.replace("my-project", "x")], regions=None)
    assert shared["reservationAffinity"]["values"] == ["projects/x/reservations/r"]


def test_n1_lists_its_gpus() -> None:
    body = vm(machine={"type": "t4", "gpus": 2}, zones=["us-central1-b"])
    assert body["guestAccelerators"] == [
        {"acceleratorType": "zones/us-central1-b/acceleratorTypes/nvidia-tesla-t4", "acceleratorCount": 2}
    ]


def test_local_ssds_are_listed_only_where_they_do_not_come_by_themselves() -> None:
    listed = vm(machine={"type": "l4", "gpus": 2, "local_ssds": 2})
    scratch = [disk for disk in listed["disks"] if disk["type"] == "SCRATCH"]
    assert len(scratch) == 2
    assert scratch[0]["interface"] == "NVME"
    own = vm(machine={"type": "h100", "gpus": 2}, provisioning=["spot"])
    assert len(own["disks"]) == 1


def test_a_stop_with_local_ssds_discards_them_and_says_so() -> None:
    plan = planned("vm", world=WORKPLACE, machine={"type": "h100", "gpus": 2}, provisioning=["spot"])
    scheduling = plan.attempts[0].request["scheduling"]
    assert scheduling["onInstanceStopAction"] == {"discardLocalSsd": True}
    assert any("local SSDs" in warning for warning in plan.warnings)
    deleted = vm(machine={"type": "h100", "gpus": 2}, provisioning=["spot"], vm={"on_stop": "delete"})
    assert "onInstanceStopAction" not in deleted["scheduling"]


@pytest.mark.parametrize(
    ("gpu", "gpus", "disk"), [("h100", 2, "pd-balanced"), ("h200", 8, "hyperdisk-balanced"), ("l4", 2, "pd-balanced")]
)
def test_boot_disk(gpu: str, gpus: int, disk: str) -> None:
    body = vm(machine={"type": gpu, "gpus": gpus}, provisioning=["spot"] if gpu != "l4" else ["standard"])
    assert body["disks"][0]["initializeParams"]["diskType"].endswith(disk)


def test_options_of_the_network() -> None:
    body = vm(vm={"external_ip": True}, identity={"network": "n", "subnetwork": "s"})
    (interface,) = body["networkInterfaces"]
    assert interface["network"] == "global/networks/n"
    assert interface["subnetwork"] == "regions/us-central1/subnetworks/s"
    assert interface["accessConfigs"]
    parse_instance(body)


def test_a_subnetwork_alone_names_its_network_itself() -> None:
    (interface,) = vm(identity={"subnetwork": "s"})["networkInterfaces"]
    assert "network" not in interface


@pytest.mark.parametrize(("wait", "seconds"), [("5s", "90"), ("6h", "7200"), ("30m", "1800")])
def test_the_wait_for_flex_start_is_what_google_takes(wait: str, seconds: str) -> None:
    fields: dict[str, Any] = {"machine": {"type": "h100", "gpus": 2}, "provisioning": ["flex-start"]}
    plan = planned("vm", world=WORKPLACE, limits={"wait": wait}, **fields)
    assert plan.attempts[0].request["params"] == {"requestValidForDuration": {"seconds": seconds}}
    assert any("limits.wait" in warning for warning in plan.warnings) == (wait != "30m")


def test_values_are_expanded_as_on_vertex() -> None:
    """`$(NAME)` and `$$` mean the same on both services; a VM has nobody to expand them, so the plan does."""
    body = request(
        "vm",
        provisioning=["spot"],
        output="gs://b-b/o",
        env={"A": "1", "B": "$(A)$$2"},
        run={"command": ["bash", "-c", "echo $$ $(B)"]},
    )
    script = next(item["value"] for item in body["metadata"]["items"] if item["key"] == "startup-script")
    assert "B=1$2" in script
    assert "echo $ 1$2" in script


def test_a_training_vm_runs_its_container_and_goes() -> None:
    body = request("vm", provisioning=["spot"], run={"config": {"steps": 3, "data": "$(X) 'q'"}}, output="gs://b-b/o")
    assert body["name"].startswith("job-")
    assert body["scheduling"]["instanceTerminationAction"] == "DELETE"
    (script,) = [item["value"] for item in body["metadata"]["items"] if item["key"] == "startup-script"]
    assert "docker run" in script
    assert '"data":"$(X) ' in script  # run.config is never expanded
    parse_instance(body)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"machine": {"type": "l4", "gpus": 2, "nodes": 2}}, "one VM"),
        ({"identity": {"service_account": "1-compute@developer.gserviceaccount.com"}}, "default compute"),
        ({"name": "dev-"}, "ends with -"),
        ({"identity": {"subnetwork": "projects/p/regions/europe-west4/subnetworks/s"}}, "is in europe-west4"),
        ({"machine": {"type": "l4", "gpus": 2, "boot_disk_type": "pd-standard"}}, "can't boot from pd-standard"),
        ({"machine": {"type": "l4", "gpus": 1, "local_ssds": 4}}, "at most 1"),
        ({"machine": {"type": "a4x-highgpu-4g"}, "provisioning": ["spot"]}, "can't be had as spot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanRefused, match=words):
        vm(**fields)


def test_every_gpu_machine_makes_a_valid_instance() -> None:
    from tests.plan.planning import CATALOG

    for shapes in CATALOG.machines.values():
        for machine in shapes:
            if machine.gpus < 1 or not machine.compute_provisioning:
                continue
            models = [model for model in machine.compute_provisioning if model != "reservation"] or [
                "reservation:projects/p/zones/us-central1-a/reservations/r"
            ]
            body = vm(
                machine={"type": machine.name, "gpus": machine.gpus, "accelerator": machine.gpu}
                if machine.guest_accelerator
                else {"type": machine.name},
                provisioning=models[:1],
                regions="any" if CATALOG.zones(machine) else None,
                zones=None if CATALOG.zones(machine) else [f"{(CATALOG.regions(machine) or ('us-central1',))[0]}-a"],
                vm={"image_family": "common-cu129-ubuntu-2404-nvidia-580"},
            )
            parse_instance(body)
