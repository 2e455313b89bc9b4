"""VMs and their disks: the Instance that the API returns, and its life by the cloud's clock.

`Park` builds an Instance from its request, `Life` changes it, with an operation for each change.

Sources for Google's own actions (operation types, users, that a Spot VM preempted during its creation is left stopped):
compute/docs/instances/create-use-spot, and users' reports (scylla-cluster-tests pull 2945, karpenter-provider-gcp
pull 37).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any

from launcher.testing.googlecloud.compute.api import (
    SYSTEM,
    Operation,
    Operations,
    Problem,
    Timeline,
    already_exists,
    not_found,
    stamp,
)
from launcher.testing.googlecloud.compute.capacity import Capacity, Demand, Shortage, shapes
from launcher.testing.googlecloud.compute.instance_checks import last
from launcher.testing.googlecloud.wire import ApiError

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
    request: Json = field(default_factory=dict)
    guest: dict[tuple[str, str], str] = field(default_factory=dict)
    serial: str = ""
    ends: str = ""
    """RFC 3339: the end of its reservation."""
    preempted: bool = False

    @property
    def status(self) -> str:
        return str(self.body["status"])

    @property
    def wanted(self) -> Demand:
        """Return the capacity that the VM consumes."""
        machine = last(self.body["machineType"])
        built_in = shapes().get(machine)
        attached = (self.body.get("guestAccelerators") or [{}])[0]
        kind = last(attached.get("acceleratorType", "")) or (built_in.accelerator if built_in else "")
        gpus = int(attached.get("acceleratorCount", 0)) or (built_in.gpus if built_in else 0)
        return Demand(self.zone, machine, self.body["scheduling"]["provisioningModel"], kind, gpus)

    @property
    def items(self) -> dict[str, str]:
        return {item["key"]: item.get("value", "") for item in self.body["metadata"].get("items", ())}

    @property
    def email(self) -> str:
        """Return the email of its service account. Empty: it has none."""
        accounts = self.body.get("serviceAccounts") or [{}]
        return str(accounts[0].get("email", ""))

    @property
    def scratch(self) -> bool:
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
        return not_found(f"projects/{self.project}/zones/{zone}/{kind}/{name}")

    def add(self, zone: str, name: str, body: Json) -> Vm:
        """Add a requested VM with its disks. Raises ApiError 409: the name is taken."""
        for kind, table in (("instances", self.vms), ("disks", self.disks)):
            if (zone, name) in table:
                raise already_exists(f"projects/{self.project}/zones/{zone}/{kind}/{name}")
        for disk in body["disks"]:
            self._check_source(zone, disk)
        vm = Vm(zone, name, str(next(self._numbers)), {}, request=body)
        vm.body = self._instance(vm)
        self.vms[zone, name] = vm
        self._add_disks(vm)
        return vm

    def add_disk(self, zone: str, name: str, gb: int = 100) -> None:
        """Add a disk that no VM uses."""
        self._add_disk(zone, name, str(gb), "pd-balanced")

    def _check_source(self, zone: str, disk: Json) -> None:
        """Check that an existing disk can be attached. Raises ApiError 404 or 400: another VM writes to it."""
        name = last(disk.get("source", ""))
        if not name:
            return
        if (zone, name) not in self.disks:
            raise self.gone(zone, "disks", name)
        users = self.disks[zone, name].get("users")
        if users and disk.get("mode") != "READ_ONLY":
            raise self.in_use(zone, name, users)

    def in_use(self, zone: str, disk: str, users: list[str]) -> ApiError:
        """Return the refusal to take a disk from its users."""
        where = f"projects/{self.project}/zones/{zone}"
        text = f"The disk resource '{where}/disks/{disk}' is already being used by "
        return ApiError(400, f"{text}'{where}/instances/{last(users[0])}'", reason="resourceInUseByAnotherResource")

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
        link = f"{self.url()}/compute/v1/projects/{self.project}/zones/{zone}"
        return f"{link}/{kind}/{name}" if kind else link

    def _instance(self, vm: Vm) -> Json:
        body, zone = vm.request, vm.zone
        kept = {name: body[name] for name in (*GIVEN, *MORE) if name in body}
        scheduling = {"onHostMaintenance": "MIGRATE", "automaticRestart": True, "preemptible": False}
        return {
            "kind": "compute#instance",
            "id": vm.number,
            **kept,
            "name": vm.name,
            "zone": self.link(zone),
            "selfLink": self.link(zone, "instances", vm.name),
            "machineType": self.link(zone, "machineTypes", last(body["machineType"])),
            "status": "PROVISIONING",
            "creationTimestamp": stamp(self.now()),
            "disks": self._attached(vm),
            "networkInterfaces": [
                self._interface(n, interface) for n, interface in enumerate(body["networkInterfaces"])
            ],
            "scheduling": {**scheduling, "provisioningModel": "STANDARD", **body.get("scheduling", {})},
            "metadata": fingerprinted({"kind": "compute#metadata", **body.get("metadata", {})}),
            "tags": fingerprinted(body.get("tags", {})),
            "labelFingerprint": fingerprint(body.get("labels", {})),
            "fingerprint": fingerprint(vm.number),
            "cpuPlatform": "Unknown CPU Platform",
            "startRestricted": False,
        }

    def _attached(self, vm: Vm) -> list[Json]:
        """Return the disks as the API shows them: without initializeParams, with the machine type's local SSDs."""
        shown = [self._disk(vm, n, disk) for n, disk in enumerate(vm.request["disks"])]
        machine = shapes().get(last(vm.request["machineType"]))
        bundled = machine.local_ssds if machine else 0
        scratch: Json = {"kind": "compute#attachedDisk", "type": "SCRATCH", "mode": "READ_WRITE", "interface": "NVME"}
        ssds = [{**scratch, "autoDelete": True, "boot": False, "diskSizeGb": "375"} for _ in range(bundled)]
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
        for shown, disk in zip(vm.body["disks"], vm.request["disks"], strict=False):
            if "source" not in shown:
                continue
            name, params = last(shown["source"]), disk.get("initializeParams", {})
            if disk.get("source"):
                self.disks[vm.zone, name].setdefault("users", []).append(vm.body["selfLink"])
                continue
            labels = {"labels": params["labels"]} if "labels" in params else {}
            kind = last(params.get("diskType", "")) or "pd-standard"
            self._add_disk(vm.zone, name, shown["diskSizeGb"], kind, users=[vm.body["selfLink"]], **labels)

    def _add_disk(self, zone: str, name: str, gb: str, kind: str, **more: Any) -> None:
        self.disks[zone, name] = {
            "kind": "compute#disk",
            "id": str(next(self._numbers)),
            "name": name,
            "zone": self.link(zone),
            "selfLink": self.link(zone, "disks", name),
            "sizeGb": gb,
            "type": self.link(zone, "diskTypes", kind),
            "status": "READY",
            "creationTimestamp": stamp(self.now()),
            **more,
        }

    def _interface(self, n: int, body: Json) -> Json:
        """Return an interface with addresses of 10.128.0.0/20, and for an external one of 203.0.113.0/24 (RFC 5737)."""
        address = next(self._addresses)
        project = f"{self.url()}/compute/v1/projects/{self.project}"
        network = last(body.get("network", "")) or "default"
        access = [{**config, "natIP": f"203.0.113.{address % 250}"} for config in body.get("accessConfigs", ())]
        return {
            "kind": "compute#networkInterface",
            **body,
            "name": f"nic{n}",
            "network": f"{project}/global/networks/{network}",
            "networkIP": body.get("networkIP") or f"10.128.{address // 250}.{address % 250}",
            "stackType": "IPV4_ONLY",
            **({"accessConfigs": access} if access else {}),
        }


def fingerprinted(value: Json) -> Json:
    bare = {name: item for name, item in value.items() if name != "fingerprint"}
    return {**bare, "fingerprint": fingerprint(bare)}


def fingerprint(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


MAKING = ("PENDING", "PROVISIONING", "STAGING")
CANCELLED = Problem("OPERATION_CANCELED_BY_USER", "Operation was canceled by user ''.")
PREEMPTED = Problem("UNSUPPORTED_OPERATION", "Instance failed to start due to preemption.")


@dataclass
class Pace:
    """Durations in seconds. `staging`, `running` and `fail` (a stockout) are counted from the request.

    A preempted VM has `notice` seconds.
    """

    staging: float = 5.0
    running: float = 10.0
    fail: float = 5.0
    stop: float = 20.0
    delete: float = 15.0
    notice: float = 30.0

    def times(self, factor: float) -> Pace:
        return Pace(**{name: seconds * factor for name, seconds in vars(self).items()})


class Life:
    """Performs the requested changes of VMs, and those that Google makes itself."""

    def __init__(self, park: Park, operations: Operations, capacity: Capacity, timeline: Timeline) -> None:
        self.park = park
        self.operations = operations
        self.capacity = capacity
        self.timeline = timeline
        self.pace = Pace()
        self._making: dict[str, Operation] = {}
        self._leaving: dict[str, list[Operation]] = {}

    def settle(self) -> None:
        """Perform all due actions. Flex-start VMs get capacity as soon as it is available."""
        self.timeline.settle()
        for vm in [vm for vm in self.park.vms.values() if vm.status == "PENDING"]:
            if self.capacity.meets(vm.wanted) is None:
                self._provision(vm)

    def make(self, vm: Vm, operation: Operation) -> None:
        """Create a VM: it reaches RUNNING, or its operation fails."""
        self._making[vm.number] = operation
        shortage = self.capacity.meets(vm.wanted)
        if shortage is None:
            self._provision(vm)
        elif vm.wanted.model == "FLEX_START":
            self._wait(vm, shortage)
        else:
            self.fail(vm, shortage)

    def run(self, vm: Vm) -> None:
        self._begin(vm, "PROVISIONING")
        self._staging(vm)
        self._running(vm)

    def make_all(self, vms: Sequence[Vm], operation: Operation, each: Sequence[Operation], least: int) -> None:
        """Create several VMs. If fewer than `least` are available, none is created and the operation fails."""
        shortage = self.capacity.meets(vms[0].wanted)
        room = len(vms) if shortage is None else min(shortage.left, len(vms))
        enough = room >= least
        for vm, own in list(zip(vms, each, strict=True))[:room]:
            self._making[vm.number] = own
            self._provision(vm)
        for vm, own in list(zip(vms, each, strict=True))[room:]:
            self._making[vm.number] = own
            self.fail(vm, shortage or Shortage())
        when = self.pace.running if enough else _or(shortage.after if shortage else None, self.pace.fail)
        self.timeline.after(when, lambda: self._end_all(vms, operation, least, room, shortage))

    def fail(self, vm: Vm, shortage: Shortage) -> None:
        """Fail the creation of a VM because of a stockout, which is noticed after a delay."""
        problem = shortage.problem(self.park.project, vm.wanted)
        self._later(vm, _or(shortage.after, self.pace.fail), lambda: self._failed(vm, problem))

    def refuse(self, vm: Vm, problem: Problem) -> None:
        """Fail the creation of a VM with any problem."""
        vm.era += 1
        self._failed(vm, problem)

    def stop(self, vm: Vm, operation: Operation) -> None:
        """Stop a VM. Its disks are kept."""
        self._leave(vm, self.pace.stop, self._stopped, operation)

    def start(self, vm: Vm, operation: Operation) -> None:
        """Start a stopped VM, if the zone still has capacity."""
        vm.era += 1
        shortage = self.capacity.meets(vm.wanted)
        self._making[vm.number] = operation
        if shortage is None:
            self._provision(vm)
            return
        vm.body["status"] = "PROVISIONING"
        problem = shortage.problem(self.park.project, vm.wanted)
        self._later(vm, _or(shortage.after, self.pace.fail), lambda: self._not_started(vm, problem))

    def delete(self, vm: Vm, operation: Operation) -> None:
        making = self._making.pop(vm.number, None)
        if making:
            self.operations.end(making, [CANCELLED])
        self._leave(vm, self.pace.delete, self._deleted, operation)

    def preempt(self, vm: Vm) -> None:
        """Preempt a Spot VM: with a notice if it is running, immediately if it is being created."""
        if vm.status in MAKING:
            self.operations.end(self._making.pop(vm.number), [PREEMPTED])
            self._event(vm, "compute.instances.preempted")
            self._take(vm, 0.0)
            return
        self._event(vm, "compute.instances.preempted")
        vm.preempted = True
        self._begin(vm, "STOPPING")
        self._later(vm, self.pace.notice, lambda: self._take(vm, 0.0))

    def host_error(self, vm: Vm) -> None:
        """Simulate a host error: the VM restarts on another host if allowed, else it is stopped."""
        self._event(vm, "compute.instances.hostError")
        self._stopped(vm)
        if vm.body["scheduling"]["automaticRestart"]:
            restart = self.operations.begin("compute.instances.automaticRestart", vm.zone, SYSTEM, **target(vm))
            self._making[vm.number] = restart
            self._provision(vm)

    def power_off(self, vm: Vm) -> None:
        operation = self.operations.begin("compute.instances.guestTerminate", vm.zone, SYSTEM, **target(vm))
        self.stop(vm, operation)

    def _provision(self, vm: Vm) -> None:
        self._begin(vm, "PROVISIONING")
        self._later(vm, self.pace.staging, lambda: self._staging(vm))
        self._later(vm, self.pace.running, lambda: self._running(vm))

    def _wait(self, vm: Vm, shortage: Shortage) -> None:
        vm.body["status"] = "PENDING"
        seconds = vm.request.get("params", {}).get("requestValidForDuration", {}).get("seconds", 0)
        self._later(vm, float(seconds), lambda: self._failed(vm, shortage.problem(self.park.project, vm.wanted)))

    def _staging(self, vm: Vm) -> None:
        vm.body |= {"status": "STAGING", "lastStartTimestamp": stamp(self.timeline.now())}

    def _running(self, vm: Vm) -> None:
        vm.body |= {"status": "RUNNING", "cpuPlatform": "Intel Sapphire Rapids"}
        vm.serial += f"[    0.000000] Linux: {vm.name} boots at {stamp(self.timeline.now())}\n"
        self.operations.end(self._making.pop(vm.number, {"status": "DONE"}))
        seconds = float(vm.body["scheduling"].get("maxRunDuration", {}).get("seconds", 0))
        if vm.ends:
            left = datetime.fromisoformat(vm.ends).timestamp() - self.timeline.now()
            seconds = min(seconds or left, left)
        if seconds:
            ends = {"terminationTimestamp": stamp(self.timeline.now() + seconds)}
            vm.body["resourceStatus"] = {"scheduling": ends}
            self._later(vm, seconds, lambda: self._take(vm, self.pace.stop))

    def _take(self, vm: Vm, seconds: float) -> None:
        """Stop or delete a VM at its end, by its instanceTerminationAction. The default is STOP."""
        action = vm.body["scheduling"].get("instanceTerminationAction", "STOP")
        kind = "delete" if action == "DELETE" else "stop"
        operation = self.operations.begin(kind, vm.zone, SYSTEM, **target(vm))
        self._leave(vm, seconds, self._deleted if kind == "delete" else self._stopped, operation)

    def _leave(self, vm: Vm, seconds: float, end: Callable[[Vm], None], operation: Operation) -> None:
        """Begin to shut a VM down. Operations that already shut it down end together with this one."""
        self._begin(vm, "STOPPING")
        self._leaving.setdefault(vm.number, []).append(operation)
        if seconds:
            self._later(vm, seconds, lambda: end(vm))
        else:
            end(vm)

    def _failed(self, vm: Vm, problem: Problem) -> None:
        self.operations.end(self._making.pop(vm.number, {"status": "DONE"}), [problem])
        self.park.remove(vm)

    def _not_started(self, vm: Vm, problem: Problem) -> None:
        self.operations.end(self._making.pop(vm.number), [problem])
        self._begin(vm, "TERMINATED")

    def _stopped(self, vm: Vm) -> None:
        self._begin(vm, "TERMINATED")
        vm.body["lastStopTimestamp"] = stamp(self.timeline.now())
        vm.body.pop("resourceStatus", None)
        vm.preempted = False
        self._left(vm)

    def _deleted(self, vm: Vm) -> None:
        vm.era += 1
        self.park.remove(vm)
        self._left(vm)

    def _left(self, vm: Vm) -> None:
        for operation in self._leaving.pop(vm.number, []):
            self.operations.end(operation)

    def _end_all(self, vms: Sequence[Vm], operation: Operation, least: int, room: int, out: Shortage | None) -> None:
        enough = room >= least
        counts = {"targetVmCount": len(vms), "createdVmCount": room, "failedToCreateVmCount": len(vms) - room}
        status = {**counts, "deletedVmCount": 0 if enough else room, "status": "DONE"}
        zone = vms[0].zone
        operation["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": {f"zones/{zone}": status}}
        if enough:
            self.operations.end(operation)
            return
        for vm in vms[:room]:
            self.delete(vm, self.operations.begin("delete", zone, SYSTEM, **target(vm)))
        short = Problem(
            "VM_MIN_COUNT_NOT_REACHED", f"Requested minimum count of {least} VMs could not be created.", 503
        )
        problem = (out or Shortage()).problem(self.park.project, vms[0].wanted)
        self.operations.end(operation, [short, problem])

    def _event(self, vm: Vm, kind: str) -> None:
        self.operations.end(self.operations.begin(kind, vm.zone, SYSTEM, **target(vm)))

    def _begin(self, vm: Vm, status: str) -> None:
        vm.era += 1
        vm.body["status"] = status

    def _later(self, vm: Vm, seconds: float, action: Callable[[], object]) -> None:
        era = vm.era
        self.timeline.after(seconds, lambda: action() if vm.era == era else None)


def target(vm: Vm) -> dict[str, str]:
    return {"targetId": vm.number, "targetLink": vm.body["selfLink"]}


def _or(seconds: float | None, usual: float) -> float:
    return usual if seconds is None else seconds
