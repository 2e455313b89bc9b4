"""Compute Engine: VMs that follow the cloud's clock, limited capacity and quotas, and users with permissions.

cloud.compute.pace = Pace(staging=0, running=0)
cloud.compute.capacity.out("us-central1-a", "a3-*")
cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
cloud.compute.preempt("train-n0")
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from launcher.testing.googlecloud.compute.api import Operations, Timeline, not_found
from launcher.testing.googlecloud.compute.capacity import Capacity, Quotas
from launcher.testing.googlecloud.compute.instance_checks import parse_bulk, parse_instance
from launcher.testing.googlecloud.compute.instances import Disks, Instances
from launcher.testing.googlecloud.compute.vms import Life, Pace, Park, Vm
from launcher.testing.googlecloud.compute.zones import IMAGE_PROJECTS, Zones
from launcher.testing.googlecloud.wire import Request, Response, Route, routes_of

__all__ = ["Compute", "Pace", "parse_bulk", "parse_instance"]

YOU = "you@example.com"


class Compute:
    """The service. Actions of a test (`preempt`, `vm` …) use the cloud's clock and its lock.

    `moment` is how long a request that waits for an operation blocks, in real seconds. `actors` are users by token. A
    request without one of these tokens is from you@example.com.
    """

    def __init__(
        self, project: str, number: str, clock: Callable[[], float], url: Callable[[], str], moment: float = 0.0
    ) -> None:
        self.project = project
        self.number = number
        self.actors: dict[str, str] = {}
        self.lock = threading.RLock()
        self.timeline = Timeline(clock)
        now = self.timeline.now
        self.park = Park(project, now, url)
        self.capacity = Capacity()
        self.quotas = Quotas()
        self.operations = Operations(project, self.timeline, url, moment)
        self.life = Life(self.park, self.operations, self.capacity, self.timeline)
        self.instances = Instances(self.park, self.life, self.operations, self.quotas, self.who)
        self.zones = Zones(self.park, self.quotas, number)
        self.instances.reservations = self.zones.reservations
        self.unreachable = self.instances.unreachable
        services = (self.operations, self.instances, Disks(self.instances, self.operations), self.zones)
        self.more_routes = [self._entered(route) for service in services for route in routes_of(service)]

    @property
    def pace(self) -> Pace:
        return self.life.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self.life.pace = pace

    def who(self, request: Request) -> str:
        return self.actors.get(request.headers.get("authorization", "").removeprefix("Bearer "), YOU)

    def deny(self, permission: str, user: str = YOU) -> None:
        """Take a permission, such as compute.instances.delete, from a user."""
        self.instances.denied.add((user, permission))

    def vm(self, name: str, zone: str = "") -> Vm:
        """Return the current state of a VM, by name or number. Raises KeyError: it does not exist."""
        with self.lock:
            self.life.settle()
            for vm in self.park.vms.values():
                if name in (vm.name, vm.number) and zone in ("", vm.zone):
                    return vm
        raise KeyError(name)

    def names(self) -> list[str]:
        with self.lock:
            self.life.settle()
            return [vm.name for vm in self.park.vms.values()]

    def made(self) -> list[dict[str, Any]]:
        """Return the operations that create VMs, in order: one for each accepted insert."""
        return [
            operation for operation in self.operations.all if operation["operationType"] in ("insert", "bulkInsert")
        ]

    def put(self, body: dict[str, Any], zone: str = "us-central1-a") -> Vm:
        """Add a running VM, as created by somebody else, from the body of an insert."""
        with self.lock:
            self.life.settle()
            vm = self.park.add(zone, parse_instance(body).name, body)
            self.life.run(vm)
            return vm

    def preempt(self, name: str) -> None:
        """Preempt a Spot VM. Its notice comes immediately."""
        self._do(name, self.life.preempt)

    def host_error(self, name: str) -> None:
        self._do(name, self.life.host_error)

    def power_off(self, name: str) -> None:
        """Shut a VM down from its own operating system."""
        self._do(name, self.life.power_off)

    def write_serial(self, name: str, text: str) -> None:
        self._do(name, lambda vm: setattr(vm, "serial", vm.serial + text))

    def set_guest(self, name: str, path: str, value: str) -> None:
        """Set a guest attribute ("launch/state") of a VM."""
        space, _, key = path.partition("/")
        self._do(name, lambda vm: vm.guest.update({(space, key): value}))

    def forget_operations(self) -> None:
        """Delete all operations, as Google does after two weeks."""
        with self.lock:
            self.operations.all.clear()

    def _do(self, name: str, action: Callable[[Vm], object]) -> None:
        vm = self.vm(name)
        with self.lock:
            action(vm)

    def _entered(self, route: Route) -> Route:
        """Wrap a route: perform due actions first, and refuse other projects except for their images."""

        def answer(request: Request, **names: str) -> Response:
            project = names["project"]
            own = {self.project, self.number, *self.zones.hosts}
            if project not in own and not (project in IMAGE_PROJECTS and route.operation.startswith("compute.images.")):
                raise not_found(f"projects/{project}")
            with self.lock:
                self.life.settle()
                response = route.answer(request, **names)
                self.life.settle()  # effects without a delay are visible immediately
                return response

        return route._replace(answer=answer)
