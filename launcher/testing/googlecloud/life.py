"""The life of a VM by the cloud's clock, with an operation for each change.

Sources for Google's own actions (operation types, users, that a Spot VM preempted during its creation is left stopped):
compute/docs/instances/create-use-spot, and users' reports (scylla-cluster-tests pull 2945, karpenter-provider-gcp
pull 37).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from launcher.testing.googlecloud.capacity import Capacity, Shortage
from launcher.testing.googlecloud.compute_operations import SYSTEM, Operation, Operations, Problem, stamp
from launcher.testing.googlecloud.timeline import Timeline
from launcher.testing.googlecloud.vms import Park, Vm

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
        """Return the durations multiplied by `factor`."""
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
        """Treat a VM as running, started now."""
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
            self.fail(vm, shortage or Shortage(), counted=False)
        if shortage is not None:
            shortage.met += 1
        when = self.pace.running if enough else _or(shortage.after if shortage else None, self.pace.fail)
        self.timeline.after(when, lambda: self._end_all(vms, operation, least, room, shortage))

    def fail(self, vm: Vm, shortage: Shortage, *, counted: bool = True) -> None:
        """Fail the creation of a VM because of a stockout, which is noticed after a delay."""
        shortage.met += counted
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
        shortage.met += 1
        problem = shortage.problem(self.park.project, vm.wanted)
        self._later(vm, _or(shortage.after, self.pace.fail), lambda: self._not_started(vm, problem))

    def delete(self, vm: Vm, operation: Operation) -> None:
        """Delete a VM and its auto-delete disks."""
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
        """Shut the VM down from its own operating system."""
        operation = self.operations.begin("compute.instances.guestTerminate", vm.zone, SYSTEM, **target(vm))
        self.stop(vm, operation)

    def _provision(self, vm: Vm) -> None:
        self._begin(vm, "PROVISIONING")
        self._later(vm, self.pace.staging, lambda: self._staging(vm))
        self._later(vm, self.pace.running, lambda: self._running(vm))

    def _wait(self, vm: Vm, shortage: Shortage) -> None:
        vm.body["status"] = "PENDING"
        asked = vm.asked.get("params", {}).get("requestValidForDuration", {}).get("seconds", 0)
        self._later(vm, float(asked), lambda: self._not_come(vm, shortage))

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
            self._later(vm, seconds, lambda: self._expire(vm))

    def _expire(self, vm: Vm) -> None:
        self._take(vm, self.pace.stop)

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

    def _not_come(self, vm: Vm, shortage: Shortage) -> None:
        shortage.met += 1
        self._failed(vm, shortage.problem(self.park.project, vm.wanted))

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
    """Return the target fields of a VM's operation."""
    return {"targetId": vm.number, "targetLink": vm.body["selfLink"]}


def _or(seconds: float | None, usual: float) -> float:
    return usual if seconds is None else seconds
