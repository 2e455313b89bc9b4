"""The Instance: what each machine and each way of getting it needs."""

from __future__ import annotations

from typing import Any

import pytest
from google.cloud import compute_v1

from launcher.errors import PlanRefused
from launcher.plan.model import Plan
from launcher.testing.googlecloud.compute.service import parse_instance
from launcher.testing.googlecloud.protobufs import parse
from tests.plan.planning import planned, request, told

WORKPLACE = {"training": False}
TRAINING: dict[str, Any] = {"provisioning": ["spot"], "output": "gs://b-b/o"}


def vm(**fields: Any) -> dict[str, Any]:
    """A VM to work on: two L4s unless something else is said."""
    known = {"machine": {"type": "l4", "gpus": 2}, "provisioning": ["standard"]}
    return request("vm", world=WORKPLACE, **{**known, **fields})


def training(nodes: int = 1, zones: list[str] | None = None, **machine: Any) -> dict[str, Any]:
    """VMs that train: two L4s in each unless something else is said."""
    return request("vm", **TRAINING, machine={"type": "l4", "gpus": 2, "nodes": nodes, **machine}, zones=zones)


@pytest.mark.parametrize("nodes", [1, 2])
def test_vms_and_their_disks_have_the_labels_by_which_their_run_is_found(nodes: int) -> None:
    plan = planned("vm", **TRAINING, machine={"type": "l4", "gpus": 2, "nodes": nodes}, labels={"team": "vision"})
    body = plan.attempts[0].request
    instance = body.get("instanceProperties", body)
    assert instance["labels"].items() >= {"launch-run": plan.run, "team": "vision"}.items()
    assert instance["disks"][0]["initializeParams"]["labels"] == instance["labels"]


def test_a_vm_that_trains_ends_at_its_time_limit() -> None:
    scheduling = request("vm", **TRAINING, limits={"hours": 2.5})["scheduling"]
    assert scheduling["maxRunDuration"] == {"seconds": "9000"}
    assert scheduling["instanceTerminationAction"] == "DELETE"


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


def test_a_dense_reservation_is_bound() -> None:
    name = "reservation:projects/my-project/zones/us-central1-a/reservations/r"
    body = vm(machine={"type": "h100", "gpus": 8}, provisioning=[name], regions=None, vm={"dense_reservation": True})
    assert body["scheduling"]["provisioningModel"] == "RESERVATION_BOUND"


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


def test_several_nodes_are_made_all_or_none() -> None:
    one, several = training(zones=["us-central1-b"]), training(nodes=3, zones=["us-central1-b"], local_ssds=1)
    run = planned("vm", **TRAINING, machine={"type": "l4", "gpus": 2, "nodes": 3, "local_ssds": 1}).run
    assert several["count"] == several["minCount"] == "3"
    assert list(several["perInstanceProperties"]) == [f"{run}-n0", f"{run}-n1", f"{run}-n2"]
    alike = several["instanceProperties"]
    assert alike["machineType"] == "g2-standard-24"
    assert [disk["initializeParams"]["diskType"] for disk in alike["disks"]] == ["pd-balanced", "local-ssd"]
    assert alike["scheduling"] == one["scheduling"]
    assert {"name", "params"}.isdisjoint(alike)
    parse(several, compute_v1.BulkInsertInstanceResource.pb()(), "resource")


def test_the_gpus_of_several_n1s_are_named_without_their_zone() -> None:
    body = training(type="t4", nodes=2, zones=["us-central1-b"])
    assert body["instanceProperties"]["guestAccelerators"] == [
        {"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}
    ]
    parse(body, compute_v1.BulkInsertInstanceResource.pb()(), "resource")


def test_several_vms_are_not_asked_for_as_flex_start() -> None:
    """The default of an H100 begins with it."""
    machine = {"type": "h100", "gpus": 2}
    models = [{one.provisioning for one in plan_of(machine={**machine, "nodes": n}).attempts} for n in (1, 2)]
    assert models == [{"flex-start", "spot"}, {"spot"}]


def test_one_interface_of_many_means_plain_tcp_between_vms() -> None:
    """The catalog's settings for the fast network name interfaces that these VMs don't have."""
    plan = plan_of(machine={"type": "h100-mega", "gpus": 8, "nodes": 2}, provisioning=["spot"])
    env = told(plan.attempts[0].request)["env"]
    assert not [name for name in env if name.startswith("NCCL_")]
    assert any("plain TCP" in warning for warning in plan.warnings)


def plan_of(**fields: Any) -> Plan:
    """The plan of VMs that train."""
    return planned("vm", **{"output": "gs://b-b/o", **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"machine": {"type": "l4", "gpus": 2, "nodes": 2}}, "a single VM to work on"),
        ({"vm": {"idle_stop": "4m"}}, "too short"),
        ({"identity": {"service_account": "1-compute@developer.gserviceaccount.com"}}, "default compute"),
        ({"name": "dev-"}, "ends with -"),
        ({"identity": {"subnetwork": "projects/p/regions/europe-west4/subnetworks/s"}}, "is in europe-west4"),
        ({"machine": {"type": "l4", "gpus": 2, "boot_disk_type": "pd-standard"}}, "cannot boot from pd-standard"),
        ({"machine": {"type": "l4", "gpus": 1, "local_ssds": 4}}, "more than"),
        ({"machine": {"type": "a4x-highgpu-4g"}, "provisioning": ["spot"]}, "not available as spot"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanRefused, match=words):
        vm(**fields)


def test_the_default_account_is_refused_with_the_way_to_a_small_one() -> None:
    account = {"service_account": "1-compute@developer.gserviceaccount.com"}
    fields: dict[str, Any] = {"machine": {"type": "l4"}, "identity": account, "output": "gs://b-b/o"}
    with pytest.raises(PlanRefused) as work:
        planned("vm", world=WORKPLACE, **fields)
    assert "gcloud iam service-accounts create" in work.value.hint
    assert "buckets" not in work.value.hint
    assert "instanceAdmin" not in work.value.hint
    with pytest.raises(PlanRefused) as train:
        planned("vm", **fields)
    assert '.startsWith("job-")' in train.value.hint
    assert "gs://b-b " in train.value.hint
    body = request("vm", world={**WORKPLACE, "allow_default_account": True}, **fields)
    assert body["serviceAccounts"][0]["email"] == account["service_account"]


@pytest.mark.parametrize(
    ("fields", "world", "words"),
    [
        ({"provisioning": ["flex-start"]}, {}, "supports a single VM"),
        ({}, {"run_id": "r" * 61}, "is too long for 2 VMs"),
        ({"provisioning": ["flex-start", "spot"]}, {}, "supports a single VM"),
    ],
)
def test_what_several_vms_can_not_have(fields: dict[str, Any], world: dict[str, Any], words: str) -> None:
    machine = {"type": "h100", "gpus": 2, "nodes": 2}
    with pytest.raises(PlanRefused, match=words):
        planned("vm", world=world, machine=machine, **{**TRAINING, **fields})


def test_a_lease_beyond_what_google_keeps_is_refused_with_the_sum() -> None:
    with pytest.raises(PlanRefused, match=r"vm\.lease: 13h is longer than limits\.hours \(12\)") as refused:
        vm(vm={"lease": "13h"})
    assert "at most $26.45" in refused.value.hint
    assert "--hours 13" in refused.value.hint
    assert vm(vm={"lease": "12h"})


def test_lease_and_idle_stop_are_for_workstations_only() -> None:
    lease = {"lease": "1h", "idle_stop": "1h"}
    assert any("vm.lease and vm.idle_stop" in one for one in plan_of(vm=lease).warnings)
    assert any("vm.lease, vm.idle_stop: no effect" in one for one in planned(vm=lease).warnings)


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


def test_compute_engines_own_account_where_somebody_wants_it() -> None:
    body = request("vm", world={"training": False, "allow_default_account": True})
    assert body["serviceAccounts"][0]["email"] == "default"
    own = request(
        "vm",
        world={"training": False, "allow_default_account": True},
        identity={"service_account": "a@p.iam.gserviceaccount.com"},
    )
    assert own["serviceAccounts"][0]["email"] == "a@p.iam.gserviceaccount.com"


DISK = {"disk": "zones/us-central1-a/disks/corpus", "path": "/data"}
NEW = {"new_disk_gb": 500, "new_disk_type": "pd-ssd", "path": "/scratch"}
KEY = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"


def test_disks_of_the_mounts_are_attached_and_only_new_ones_are_deleted_with_the_vm() -> None:
    plan = plan_of(
        machine={"type": "l4", "gpus": 2, "local_ssds": 1},
        zones=["us-central1-a"],
        provisioning=["spot"],
        identity={"kms_key": KEY},
        mounts=[{"bucket": "b-1"}, DISK, NEW],
    )
    body = plan.attempts[0].request
    boot, scratch, existing, new = body["disks"]
    assert boot["boot"]
    assert scratch["type"] == "SCRATCH"
    assert existing == {
        "boot": False,
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "autoDelete": False,
        "deviceName": "launch-mount-1",
        "source": "zones/us-central1-a/disks/corpus",
    }
    assert new == {
        "boot": False,
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "autoDelete": True,
        "deviceName": "launch-mount-2",
        "initializeParams": {
            "diskType": "zones/us-central1-a/diskTypes/pd-ssd",
            "diskSizeGb": "500",
            "labels": body["labels"],
        },
        "diskEncryptionKey": {"kmsKeyName": KEY},
    }
    parse_instance(body)
    assert [one["kind"] for one in told(body)["mounts"]] == ["bucket", "disk", "new_disk"]


def test_a_new_disk_is_by_default_of_the_boot_disks_type_and_part_of_no_run_id() -> None:
    fields: dict[str, Any] = {"machine": {"type": "h200", "gpus": 8}, "provisioning": ["spot"]}
    plan = plan_of(**fields, mounts=[{"new_disk_gb": 100, "path": "/a"}])
    *_, new = plan.attempts[0].request["disks"]
    assert new["initializeParams"]["diskType"].endswith("/hyperdisk-balanced")
    assert plan.run == plan_of(**fields).run


def test_several_vms_share_a_disk_read_only_and_get_a_new_one_each() -> None:
    machine = {"type": "l4", "gpus": 2, "nodes": 2}
    fields: dict[str, Any] = {"machine": machine, "zones": ["us-central1-a"], "provisioning": ["spot"]}
    body = plan_of(**fields, mounts=[{**DISK, "read_only": True}, NEW]).attempts[0].request
    _, existing, new = body["instanceProperties"]["disks"]
    assert (existing["source"], existing["mode"]) == ("corpus", "READ_ONLY")
    assert new["initializeParams"]["diskType"] == "pd-ssd"
    parse(body, compute_v1.BulkInsertInstanceResource.pb()(), "resource")
    with pytest.raises(PlanRefused, match=r"mounts\[0\].disk: .* read-only"):
        plan_of(**fields, mounts=[DISK])


@pytest.mark.parametrize(
    ("target", "fields", "words"),
    [
        ("vertex", {"mounts": [DISK]}, r"mounts\[0\].disk: Vertex AI cannot attach disks"),
        ("vertex", {"mounts": [NEW]}, r"mounts\[0\].new_disk_gb: Vertex AI cannot attach disks"),
        ("vm", {"mounts": [DISK]}, r"mounts\[0\].disk: .* is in us-central1-a, but the job may run in us-central1-b"),
        (
            "vm",
            {"machine": {"type": "h200", "gpus": 8}, "mounts": [NEW]},
            r"mounts\[0\].new_disk_type: a3-ultragpu-8g does not support pd-ssd",
        ),
    ],
)
def test_a_disk_that_cannot_be_attached(target: str, fields: dict[str, Any], words: str) -> None:
    known = {"machine": {"type": "h100", "gpus": 2}, "provisioning": ["spot"], "output": "gs://b-b/o"}
    with pytest.raises(PlanRefused, match=words) as refused:
        planned(target, **{**known, **fields})
    assert refused.value.hint


def test_a_vm_to_work_on_has_none_of_the_mounts_and_says_so() -> None:
    plan = planned("vm", world=WORKPLACE, machine={"type": "l4", "gpus": 2}, mounts=[DISK, NEW])
    assert len(plan.attempts[0].request["disks"]) == 1
    assert any(warning.startswith("mounts: no effect on a VM to work on") for warning in plan.warnings)
