"""Compute Engine: VMs that live by the cloud's clock, zones that run out of them, and who asks for all that.

cloud.compute.pace = Pace(staging=0, running=0)
cloud.compute.capacity.out("us-central1-a", "a3-*")
cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
cloud.compute.preempt("train-n0")
with MetadataServer(cloud, "us-central1-a", "train-n0") as server: ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.googlecloud.capacity import Capacity, Quotas
from tests.googlecloud.compute_operations import Operations
from tests.googlecloud.disks import Disks
from tests.googlecloud.errors import ApiError
from tests.googlecloud.instance_checks import parse_bulk, parse_instance
from tests.googlecloud.instance_reads import InstanceReads
from tests.googlecloud.instances import Instances
from tests.googlecloud.life import Life, Pace
from tests.googlecloud.timeline import Timeline
from tests.googlecloud.vms import Park, Vm
from tests.googlecloud.wire import Request, Response, Route
from tests.googlecloud.zones import IMAGE_PROJECTS, Zones

__all__ = ["Compute", "Pace", "parse_bulk", "parse_instance"]

YOU = "you@example.com"


class Compute:
    """The service. What a test does to it by itself (`preempt`, `vm` …) is done at the cloud's time, under its lock.

    `moment`: how long a client that waits for an operation is kept, in real seconds. `actors` are users by the token
    that they show; who shows none of these is you@example.com.
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
        self.capacity = Capacity(now)
        self.quotas = Quotas()
        self.operations = Operations(project, self.timeline, url, moment)
        self.life = Life(self.park, self.operations, self.capacity, self.timeline)
        self.instances = Instances(self.park, self.life, self.operations, self.quotas, self.who)
        self.zones = Zones(self.park, self.quotas, number)
        more = (InstanceReads(self.instances), Disks(self.instances, self.operations))
        services = (self.operations, *more, self.instances, self.zones)
        self.routes: list[Route] = [self._entered(one) for service in services for one in service.routes]

    @property
    def pace(self) -> Pace:
        """How long things take."""
        return self.life.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self.life.pace = pace

    @property
    def unreachable(self) -> set[str]:
        """Zones of which no list can be had."""
        return self.instances.unreachable

    def who(self, request: Request) -> str:
        """The user that a request comes from."""
        return self.actors.get(request.headers.get("authorization", "").removeprefix("Bearer "), YOU)

    def deny(self, permission: str, user: str = YOU) -> None:
        """From now on a user lacks a permission, such as compute.instances.delete."""
        self.instances.denied.add((user, permission))

    def vm(self, name: str, zone: str = "") -> Vm:
        """A VM as it is now, by its name or number. Raises KeyError for one that isn't there."""
        with self.lock:
            self.life.settle()
            for vm in self.park.vms.values():
                if name in (vm.name, vm.number) and zone in ("", vm.zone):
                    return vm
        raise KeyError(name)

    def names(self) -> list[str]:
        """All VMs there are now."""
        with self.lock:
            self.life.settle()
            return [vm.name for vm in self.park.vms.values()]

    def made(self) -> list[dict[str, Any]]:
        """The operations that were to make VMs, in their order: one for each insert that was taken."""
        return [one for one in self.operations.all if one["operationType"] in ("insert", "bulkInsert")]

    def put(self, body: dict[str, Any], zone: str = "us-central1-a") -> Vm:
        """A VM that is there already and runs, as somebody else may have made it: the body of an insert."""
        with self.lock:
            self.life.settle()
            vm = self.park.add(zone, parse_instance(body).name, body)
            self.life.run(vm)
            return vm

    def preempt(self, name: str) -> None:
        """A Spot VM is taken away: its notice comes now."""
        self._do(name, self.life.preempt)

    def host_error(self, name: str) -> None:
        """The host of a VM breaks."""
        self._do(name, self.life.host_error)

    def power_off(self, name: str) -> None:
        """A VM shuts itself down."""
        self._do(name, self.life.power_off)

    def maintain(self, name: str, event: str = "TERMINATE_ON_HOST_MAINTENANCE") -> None:
        """The metadata server of a VM tells of maintenance."""
        self._do(name, lambda vm: setattr(vm, "maintenance", event))

    def write_serial(self, name: str, text: str) -> None:
        """A VM says something on its serial port."""
        self._do(name, lambda vm: setattr(vm, "serial", vm.serial + text))

    def set_guest(self, name: str, path: str, value: str) -> None:
        """A VM sets a guest attribute: "launch/state"."""
        space, _, key = path.partition("/")
        self._do(name, lambda vm: vm.guest.update({(space, key): value}))

    def forget_operations(self) -> None:
        """Nothing is known any more of what was done, as two weeks later."""
        with self.lock:
            self.operations.all.clear()

    def _do(self, name: str, action: Callable[[Vm], object]) -> None:
        vm = self.vm(name)
        with self.lock:
            action(vm)

    def _entered(self, one: Route) -> Route:
        """Whatever is asked, first what is due has happened; other projects aren't there, but for their images."""

        def answer(request: Request, **names: str) -> Response:
            project = names["project"]
            if project not in (self.project, self.number) and not (
                project in IMAGE_PROJECTS and one.operation.startswith("compute.images.")
            ):
                raise ApiError(404, f"The resource 'projects/{project}' was not found", reason="notFound")
            with self.lock:
                self.life.settle()
                response = one.answer(request, **names)
                self.life.settle()  # what takes no time has happened with it
                return response

        return one._replace(answer=answer)
