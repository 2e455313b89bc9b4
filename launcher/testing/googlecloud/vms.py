"""VMs and their disks: the Instance that the API returns, built from the request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from launcher.testing.googlecloud.capacity import Demand
from launcher.testing.googlecloud.compute_operations import stamp
from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.instance_checks import last
from launcher.testing.googlecloud.shapes import shapes

Json = dict[str, Any]
GIVEN = ("name", "description", "labels", "tags", "guestAccelerators", "serviceAccounts", "reservationAffinity")
MORE = ("shieldedInstanceConfig", "canIpForward", "deletionProtection", "minCpuPlatform", "resourcePolicies")
UP = ("PENDING", "PROVISIONING", "STAGING", "RUNNING", "STOPPING", "REPAIRING", "SUSPENDING")
"""The states in which a VM consumes capacity and quota."""


@dataclass
class Vm:
    """A VM. `body` is the Instance. `era` changes with each action, which drops earlier planned actions."""

    zone: str
    name: str
    number: str
    body: Json
    era: int = 0
    asked: Json = field(default_factory=dict)
    guest: dict[tuple[str, str], str] = field(default_factory=dict)
    serial: str = ""
    ends: str = ""
    """RFC 3339: the end of its reservation."""
    preempted: bool = False
    maintenance: str = "NONE"

    @property
    def status(self) -> str:
        """Return the Instance's status."""
        return str(self.body["status"])

    @property
    def wanted(self) -> Demand:
        """Return the capacity that the VM consumes."""
        machine = last(self.body["machineType"])
        found = shapes().get(machine)
        attached = (self.body.get("guestAccelerators") or [{}])[0]
        kind = last(attached.get("acceleratorType", "")) or (found.accelerator if found else "")
        gpus = int(attached.get("acceleratorCount", 0)) or (found.gpus if found else 0)
        return Demand(self.zone, machine, self.body["scheduling"]["provisioningModel"], kind, gpus)

    @property
    def items(self) -> dict[str, str]:
        """Return its metadata."""
        return {item["key"]: item.get("value", "") for item in self.body["metadata"].get("items", ())}

    @property
    def email(self) -> str:
        """Return the email of its service account. Empty: it has none."""
        accounts = self.body.get("serviceAccounts") or [{}]
        return str(accounts[0].get("email", ""))

    @property
    def scratch(self) -> bool:
        """Return whether it has local SSDs."""
        return any(disk["type"] == "SCRATCH" for disk in self.body["disks"])


class Park:
    """All VMs and disks of the project, in the order of creation."""

    def __init__(self, project: str, now: Callable[[], float], url: Callable[[], str]) -> None:
        self.project = project
        self.now = now
        self.url = url
        self.vms: dict[tuple[str, str], Vm] = {}
        self.disks: dict[tuple[str, str], Json] = {}
        self._numbers = count(5_000_000_000_000_000_001)
        self._addresses = count(2)

    def find(self, zone: str, name: str) -> Vm:
        """Return a VM by name or number. Raises ApiError 404."""
        for vm in self.vms.values():
            if vm.zone == zone and name in (vm.name, vm.number):
                return vm
        raise self.gone(zone, "instances", name)

    def gone(self, zone: str, kind: str, name: str) -> ApiError:
        """Return the error for a missing resource."""
        resource = f"projects/{self.project}/zones/{zone}/{kind}/{name}"
        return ApiError(404, f"The resource '{resource}' was not found", reason="notFound")

    def add(self, zone: str, name: str, asked: Json) -> Vm:
        """Add a requested VM with its disks. Raises ApiError 409: the name is taken."""
        for kind, table in (("instances", self.vms), ("disks", self.disks)):
            if (zone, name) in table:
                resource = f"projects/{self.project}/zones/{zone}/{kind}/{name}"
                raise ApiError(409, f"The resource '{resource}' already exists", reason="alreadyExists")
        for disk in asked["disks"]:
            self._check_source(zone, disk)
        vm = Vm(zone, name, str(next(self._numbers)), {}, asked=asked)
        vm.body = self._instance(vm)
        self.vms[zone, name] = vm
        self._add_disks(vm)
        return vm

    def add_disk(self, zone: str, name: str, gb: int = 100) -> None:
        """Add a disk that no VM uses."""
        self.disks[zone, name] = {
            "kind": "compute#disk",
            "id": str(next(self._numbers)),
            "name": name,
            "zone": self.link(zone),
            "selfLink": self.link(zone, "disks", name),
            "sizeGb": str(gb),
            "type": self.link(zone, "diskTypes", "pd-balanced"),
            "status": "READY",
            "creationTimestamp": stamp(self.now()),
        }

    def _check_source(self, zone: str, disk: Json) -> None:
        """Check that an existing disk can be attached. Raises ApiError 404 or 400: another VM writes to it."""
        name = last(disk.get("source", ""))
        if not name:
            return
        if (zone, name) not in self.disks:
            raise self.gone(zone, "disks", name)
        users = self.disks[zone, name].get("users")
        if users and disk.get("mode") != "READ_ONLY":
            where = f"projects/{self.project}/zones/{zone}"
            text = f"The disk resource '{where}/disks/{name}' is already being used by "
            user = f"'{where}/instances/{last(users[0])}'"
            raise ApiError(400, text + user, reason="resourceInUseByAnotherResource")

    def remove(self, vm: Vm) -> None:
        """Remove a VM and its auto-delete disks."""
        self.vms.pop((vm.zone, vm.name), None)
        for disk in vm.body["disks"]:
            key = vm.zone, last(disk.get("source", ""))
            if disk.get("autoDelete"):
                self.disks.pop(key, None)
            elif key in self.disks:
                users = [user for user in self.disks[key].pop("users", ()) if user != vm.body["selfLink"]]
                self.disks[key] |= {"users": users} if users else {}

    def up(self) -> Iterator[Vm]:
        """Yield the VMs that consume capacity and quota."""
        return (vm for vm in self.vms.values() if vm.status in UP)

    def link(self, zone: str, kind: str = "", name: str = "") -> str:
        """Return a resource's URL."""
        link = f"{self.url()}/compute/v1/projects/{self.project}/zones/{zone}"
        return f"{link}/{kind}/{name}" if kind else link

    def _instance(self, vm: Vm) -> Json:
        asked, zone = vm.asked, vm.zone
        given = {name: asked[name] for name in (*GIVEN, *MORE) if name in asked}
        scheduling = {"onHostMaintenance": "MIGRATE", "automaticRestart": True, "preemptible": False}
        return {
            "kind": "compute#instance",
            "id": vm.number,
            **given,
            "name": vm.name,
            "zone": self.link(zone),
            "selfLink": self.link(zone, "instances", vm.name),
            "machineType": self.link(zone, "machineTypes", last(asked["machineType"])),
            "status": "PROVISIONING",
            "creationTimestamp": stamp(self.now()),
            "disks": self._attached(vm),
            "networkInterfaces": [self._interface(n, one) for n, one in enumerate(asked["networkInterfaces"])],
            "scheduling": {**scheduling, "provisioningModel": "STANDARD", **asked.get("scheduling", {})},
            "metadata": fingerprinted({"kind": "compute#metadata", **asked.get("metadata", {})}),
            "tags": fingerprinted(asked.get("tags", {})),
            "labelFingerprint": fingerprint(asked.get("labels", {})),
            "fingerprint": fingerprint(vm.number),
            "cpuPlatform": "Unknown CPU Platform",
            "startRestricted": False,
        }

    def _attached(self, vm: Vm) -> list[Json]:
        """Return the disks as the API shows them: without initializeParams, with the machine type's local SSDs."""
        shown = [self._disk(vm, n, disk) for n, disk in enumerate(vm.asked["disks"])]
        found = shapes().get(last(vm.asked["machineType"]))
        own = found.local_ssds if found else 0
        scratch: Json = {"kind": "compute#attachedDisk", "type": "SCRATCH", "mode": "READ_WRITE", "interface": "NVME"}
        ssds = [{**scratch, "autoDelete": True, "boot": False, "diskSizeGb": "375"} for _ in range(own)]
        return [{**disk, "index": n} for n, disk in enumerate([*shown, *ssds])]

    def _disk(self, vm: Vm, n: int, disk: Json) -> Json:
        kept = {name: value for name, value in disk.items() if name not in ("initializeParams", "diskEncryptionKey")}
        size = disk.get("initializeParams", {}).get("diskSizeGb", disk.get("diskSizeGb"))
        if disk.get("type") == "SCRATCH":
            return {"kind": "compute#attachedDisk", "boot": False, **kept, "diskSizeGb": "375"}
        name = disk.get("initializeParams", {}).get("diskName") or (vm.name if n == 0 else f"{vm.name}-{n}")
        source = self.link(vm.zone, "disks", last(disk.get("source", "")) or name)
        first = {"kind": "compute#attachedDisk", "type": "PERSISTENT", "mode": "READ_WRITE", "autoDelete": False}
        return {**first, "deviceName": f"persistent-disk-{n}", **kept, "source": source, "diskSizeGb": str(size or 10)}

    def _add_disks(self, vm: Vm) -> None:
        for shown, disk in zip(vm.body["disks"], vm.asked["disks"], strict=False):
            if "source" not in shown:
                continue
            name, params = last(shown["source"]), disk.get("initializeParams", {})
            if disk.get("source"):
                self.disks[vm.zone, name].setdefault("users", []).append(vm.body["selfLink"])
                continue
            self.disks[vm.zone, name] = {
                "kind": "compute#disk",
                "id": str(next(self._numbers)),
                "name": name,
                "zone": self.link(vm.zone),
                "selfLink": self.link(vm.zone, "disks", name),
                "sizeGb": shown["diskSizeGb"],
                "type": self.link(vm.zone, "diskTypes", last(params.get("diskType", "")) or "pd-standard"),
                "status": "READY",
                "creationTimestamp": stamp(self.now()),
                "users": [vm.body["selfLink"]],
                **({"labels": params["labels"]} if "labels" in params else {}),
            }

    def _interface(self, n: int, asked: Json) -> Json:
        """Return an interface with addresses of 10.128.0.0/20, and for an external one of 203.0.113.0/24 (RFC 5737)."""
        address = next(self._addresses)
        project = f"{self.url()}/compute/v1/projects/{self.project}"
        network = last(asked.get("network", "")) or "default"
        access = [{**one, "natIP": f"203.0.113.{address % 250}"} for one in asked.get("accessConfigs", ())]
        return {
            "kind": "compute#networkInterface",
            **asked,
            "name": f"nic{n}",
            "network": f"{project}/global/networks/{network}",
            "networkIP": asked.get("networkIP") or f"10.128.{address // 250}.{address % 250}",
            "stackType": "IPV4_ONLY",
            **({"accessConfigs": access} if access else {}),
        }


def fingerprinted(value: Json) -> Json:
    """Return the value with a fingerprint of its content."""
    bare = {name: one for name, one in value.items() if name != "fingerprint"}
    return {**bare, "fingerprint": fingerprint(bare)}


def fingerprint(value: object) -> str:
    """Return the fingerprint of any JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
