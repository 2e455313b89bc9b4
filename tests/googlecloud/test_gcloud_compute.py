"""The real gcloud with Compute Engine on loopback: a VM's life, and our requests compared with gcloud's."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import GoogleCloud, Pace, parse_instance
from launcher.testing.googlecloud.protobufs import to_json
from tests.rendered import JOB_SPECS, difference, plan

pytestmark = pytest.mark.gcloud

MODELS = ("STANDARD", "SPOT")
"""Provisioning models that gcloud 528 knows; of FLEX_START and RESERVATION_BOUND the protobuf type judges alone."""

ONLY_ONE: dict[str, str] = {
    "canIpForward": "gcloud writes the usual value down: no forwarding",
    "deletionProtection": "gcloud writes the usual value down: no protection",
    "disks[0].initializeParams.labels": "gcloud 528 has no flag for the labels of a boot disk",
}
"""Fields that only one of the two sets, with the reason, in every request."""
OTHERWISE: dict[str, str] = {
    "networkInterfaces[0].accessConfigs[0].name": "a name and no more; ours is the one that the API recommends",
}
"""Fields that the two may set differently, with the reason."""

ON_DEMAND: dict[str, Any] = {"name": "dev", "provisioning": "standard", "limits": {"hours": 8}}
SHAPES: dict[str, dict[str, Any]] = {
    "an L4 with an external IP": {
        **ON_DEMAND,
        "machine": {"type": "l4", "gpus": 1},
        "zones": ["us-central1-a"],
        "vm": {"external_ip": True, "on_stop": "delete"},
    },
    "a T4 on N1": {
        **ON_DEMAND,
        "machine": {"type": "t4", "gpus": 1, "boot_disk_type": "pd-ssd"},
        "zones": ["us-central1-a"],
    },
    "eight H100s": {**ON_DEMAND, "machine": {"type": "a3-highgpu-8g"}, "zones": ["us-central1-a"]},
    "an H100, spot, in a subnetwork": {
        **ON_DEMAND,
        "provisioning": "spot",
        "machine": {"type": "h100", "gpus": 1},
        "zones": ["us-east4-a"],
        "identity": {"subnetwork": "projects/my-project/regions/us-east4/subnetworks/train"},
    },
    "a reservation": {
        **ON_DEMAND,
        "provisioning": "reservation:projects/my-project/zones/us-central1-a/reservations/mine",
        "machine": {"type": "a3-highgpu-8g"},
        "zones": ["us-central1-a"],
    },
}


@pytest.fixture
def at_once(cloud: GoogleCloud) -> GoogleCloud:
    """The cloud on a fake clock, with all durations 0."""
    cloud.compute.pace = Pace(staging=0, running=0, fail=0, stop=0, delete=0)
    cloud.compute.zones.reservations["us-central1-a", "mine"] = {"status": "READY"}
    return cloud


def run(cloud: GoogleCloud, gcloud: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [gcloud, "compute", "instances", *arguments]
    environment = {**os.environ, **cloud.environ()}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_gcloud_makes_sees_and_deletes_a_vm(gcloud: str, at_once: GoogleCloud) -> None:
    cloud, where = at_once, "--zone=us-central1-a"
    kind = ["--machine-type=g2-standard-4", "--maintenance-policy=TERMINATE", "--labels=launch-run=dev"]
    created = run(cloud, gcloud, "create", "dev", where, *kind)
    assert created.returncode == 0, created.stderr
    listed = run(cloud, gcloud, "list", "--filter=labels.launch-run=dev", "--format=json")
    assert [(one["name"], one["status"]) for one in json.loads(listed.stdout)] == [("dev", "RUNNING")]
    for verb, state in (("stop", "TERMINATED"), ("start", "RUNNING")):
        done = run(cloud, gcloud, verb, "dev", where)
        assert done.returncode == 0, done.stderr
        assert cloud.compute.vm("dev").status == state
    described = run(cloud, gcloud, "describe", "dev", where, "--format=value(status)")
    assert described.stdout.strip() == "RUNNING"
    assert run(cloud, gcloud, "delete", "dev", where).returncode == 0
    assert cloud.compute.names() == []


def test_gcloud_shows_a_stockout_as_google_words_it(gcloud: str, at_once: GoogleCloud) -> None:
    at_once.compute.capacity.out(available=("us-central1-b",))
    kind = ["--machine-type=g2-standard-4", "--maintenance-policy=TERMINATE"]
    refused = run(at_once, gcloud, "create", "dev", "--zone=us-central1-a", *kind)
    assert refused.returncode == 1
    assert "code: ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS" in refused.stderr
    assert "zonesAvailable: us-central1-b" in refused.stderr
    assert "reason: resource_availability" in refused.stderr


@pytest.mark.parametrize("spec", sorted(JOB_SPECS.glob("vm-*.yaml")), ids=lambda path: path.stem)
def test_gcloud_sends_what_we_send(spec: Path, gcloud: str, at_once: GoogleCloud, tmp_path: Path) -> None:
    assert_gcloud_agrees(plan("vm", spec), gcloud, at_once, tmp_path)


@pytest.mark.parametrize("name", SHAPES)
def test_gcloud_sends_what_we_send_for_every_shape(
    name: str, gcloud: str, at_once: GoogleCloud, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps(SHAPES[name]))
    assert_gcloud_agrees(plan("vm", spec), gcloud, at_once, tmp_path)


def test_gcloud_attaches_the_disks_that_we_attach(gcloud: str, at_once: GoogleCloud, tmp_path: Path) -> None:
    mounts = [
        {"disk": "zones/us-central1-a/disks/corpus", "path": "/data"},
        {"disk": "zones/us-central1-a/disks/shared", "path": "/shared", "read_only": True},
        {"new_disk_gb": 500, "new_disk_type": "pd-ssd", "path": "/scratch"},
    ]
    for disk in ("corpus", "shared"):
        at_once.compute.park.add_disk("us-central1-a", disk)
    spec = tmp_path / "spec.yaml"
    spec.write_text(json.dumps({**SHAPES["an L4 with an external IP"], "mounts": mounts, "output": "gs://b-b/o"}))
    planned = plan("vm", spec, "--run")
    more = ("disks[3].initializeParams.labels",)
    assert_gcloud_agrees(planned, gcloud, at_once, tmp_path, more=more)
    attached = {disk["name"]: bool(disk.get("users")) for disk in at_once.compute.park.disks.values()}
    vm = planned["run"]
    assert attached == {"corpus": True, "shared": True, vm: True, f"{vm}-3": True}
    assert run(at_once, gcloud, "delete", vm, "--zone=us-central1-a").returncode == 0
    assert {disk["name"] for disk in at_once.compute.park.disks.values()} == {"corpus", "shared"}


def assert_gcloud_agrees(
    planned: dict[str, Any], gcloud: str, cloud: GoogleCloud, folder: Path, more: tuple[str, ...] = ()
) -> None:
    """The first attempt's request equals gcloud's for the same VM, field by field; `more` fields only we set."""
    body = planned["attempts"][0]["request"]
    assert body["scheduling"]["provisioningModel"] in MODELS
    done = run(cloud, gcloud, "create", *arguments(body, folder))
    assert done.returncode == 0, done.stderr
    [arrived] = [one.body for one in cloud.requests if one.method == "POST" and one.path.endswith("/instances")]
    sent, ours = (comparable(to_json(type(one).pb(one))) for one in map(parse_instance, (arrived, body)))
    differences = list(difference(sent, ours))
    fields = {line.partition(": ")[0] for line in differences}
    assert fields - set(OTHERWISE) == {*ONLY_ONE, *more}, "gcloud sent != we send\n" + "\n".join(differences)


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Shorten links to the resource below the project, and key metadata by name: its order is irrelevant."""
    text = json.dumps({**body, "metadata": {item["key"]: item["value"] for item in body["metadata"]["items"]}})
    return dict(json.loads(text, object_hook=lambda found: {name: short(value) for name, value in found.items()}))


def short(value: Any) -> Any:
    """Return a resource without host and own project, which each of the two may include or omit."""
    if not isinstance(value, str):
        return value
    own = value.partition("/compute/v1/")[2] if value.startswith("http://127.0.0.1") else value
    return own.removeprefix("projects/my-project/")


def arguments(body: dict[str, Any], folder: Path) -> list[str]:
    """Return the flags of `gcloud compute instances create` for this VM."""
    zone = body["machineType"].split("/")[1]
    labels = ",".join(f"{key}={value}" for key, value in body["labels"].items())
    return [
        body["name"],
        f"--zone={zone}",
        f"--machine-type={last(body['machineType'])}",
        f"--labels={labels}",
        *(
            f"--accelerator=type={last(one['acceleratorType'])},count={one['acceleratorCount']}"
            for one in body.get("guestAccelerators", ())
        ),
        *disks(body["disks"]),
        network(body["networkInterfaces"][0]),
        *scheduling(body["scheduling"]),
        *reservation(body.get("reservationAffinity", {})),
        f"--service-account={body['serviceAccounts'][0]['email']}",
        f"--scopes={','.join(body['serviceAccounts'][0]['scopes'])}",
        *metadata(body["metadata"]["items"], folder),
        *(flag(name, value) for name, value in shielded(body["shieldedInstanceConfig"])),
    ]


def disks(asked: list[dict[str, Any]]) -> Iterator[str]:
    boot, *others = asked
    params = boot["initializeParams"]
    _, project, _, _, _, family = params["sourceImage"].split("/")
    yield from (f"--image-project={project}", f"--image-family={family}")
    yield from (f"--boot-disk-size={params['diskSizeGb']}GB", f"--boot-disk-type={last(params['diskType'])}")
    yield from map(other_disk, others)


def other_disk(asked: dict[str, Any]) -> str:
    if asked["type"] == "SCRATCH":
        return "--local-ssd=interface=nvme"
    mode = {"READ_WRITE": "rw", "READ_ONLY": "ro"}[asked["mode"]]
    common = f"device-name={asked['deviceName']},mode={mode},auto-delete={'yes' if asked['autoDelete'] else 'no'}"
    if "source" in asked:
        return f"--disk=name={last(asked['source'])},{common}"
    params = asked["initializeParams"]
    return f"--create-disk=size={params['diskSizeGb']}GB,type={last(params['diskType'])},{common}"


def network(asked: dict[str, Any]) -> str:
    where = [f"network={last(asked['network'])}"] if "network" in asked else []
    where += [f"subnet={asked['subnetwork']}"] if "subnetwork" in asked else []
    outside = [] if "accessConfigs" in asked else ["no-address"]
    parts = [*where, f"nic-type={asked['nicType']}", *outside]
    return f"--network-interface={','.join(parts)}"


def scheduling(asked: dict[str, Any]) -> Iterator[str]:
    yield f"--provisioning-model={asked['provisioningModel']}"
    yield f"--maintenance-policy={asked['onHostMaintenance']}"
    yield flag("restart-on-failure", asked["automaticRestart"])
    yield f"--max-run-duration={asked['maxRunDuration']['seconds']}s"
    yield f"--instance-termination-action={asked['instanceTerminationAction']}"
    if asked.get("onInstanceStopAction"):
        yield "--discard-local-ssds-at-termination-timestamp=true"


def reservation(asked: dict[str, Any]) -> list[str]:
    return ["--reservation-affinity=specific", f"--reservation={asked['values'][0]}"] if asked else []


def metadata(items: list[dict[str, str]], folder: Path) -> Iterator[str]:
    """Yield the option that passes each value unchanged, from a file."""
    files = {item["key"]: folder / item["key"] for item in items}
    for item in items:
        files[item["key"]].write_text(item["value"], encoding="utf-8")
    yield f"--metadata-from-file={','.join(f'{key}={file}' for key, file in files.items())}"


def shielded(asked: dict[str, bool]) -> Iterator[tuple[str, bool]]:
    names = {
        "enableSecureBoot": "secure-boot",
        "enableVtpm": "vtpm",
        "enableIntegrityMonitoring": "integrity-monitoring",
    }
    return ((f"shielded-{names[field]}", value) for field, value in asked.items())


def flag(name: str, value: bool) -> str:
    return f"--{name}" if value else f"--no-{name}"


def last(link: str) -> str:
    return link.rpartition("/")[2]
