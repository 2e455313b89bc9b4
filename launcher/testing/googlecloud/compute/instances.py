"""The Instances API, and the Disks API, whose disks are attached to VMs or left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from launcher.testing.googlecloud.compute.api import ZONE, Operation, Operations, aggregated, listed
from launcher.testing.googlecloud.compute.capacity import Quotas, is_zone, regions, shape, zones
from launcher.testing.googlecloud.compute.instance_checks import (
    DISCARD,
    bad,
    check_metadata,
    invalid,
    last,
    numbered,
    parse_bulk,
    parse_instance,
)
from launcher.testing.googlecloud.compute.vms import MAKING, Json, Life, Park, Vm, fingerprinted, target
from launcher.testing.googlecloud.wire import (
    ApiError,
    Request,
    Response,
    Target,
    json_response,
    new_route,
    route,
)

INSTANCES = ZONE + "/instances"
INSTANCE = INSTANCES + "/{instance}"
AGGREGATED = "/compute/v1/projects/{project}/aggregated/instances"
DISK = ZONE + "/disks/{disk}"
REMEMBERED = 3600.0
"""Seconds for which a request id is remembered (instances.insert, requestId)."""
DOWN = ("TERMINATED", "STOPPED", "SUSPENDED")


def _asked_name(request: Request, project: str, zone: str) -> Target:
    """Return the instance that an insert names."""
    try:
        return Target(str(json.loads(request.body)["name"]))
    except (ValueError, KeyError, TypeError):
        return Target("")


class Instances:
    """The instances.

    `who` returns the user of a request. `denied` has pairs of a user and a permission that the user lacks.
    `unreachable` has zones that lists can't read. `reservations` are those of the zones.
    """

    def __init__(
        self, park: Park, life: Life, operations: Operations, quotas: Quotas, who: Callable[[Request], str]
    ) -> None:
        self.park = park
        self.life = life
        self.operations = operations
        self.quotas = quotas
        self.who = who
        self.denied: set[tuple[str, str]] = set()
        self.unreachable: set[str] = set()
        self.reservations: dict[tuple[str, str], Json] = {}
        self._requests: dict[str, tuple[float, str, Operation]] = {}
        actions = {"stop": self.stop, "start": self.start, "setMetadata": self.set_metadata}
        self.more_routes = [
            new_route("DELETE", INSTANCE, self._acting("delete", self.delete), "compute.instances.delete"),
            *(
                new_route("POST", f"{INSTANCE}/{name}", self._acting(name, act), f"compute.instances.{name}")
                for name, act in actions.items()
            ),
        ]

    @route("POST", INSTANCES, "compute.instances.insert", query="requestId", target=_asked_name)
    def insert(self, request: Request, project: str, zone: str) -> Response:
        return self._once(request, lambda: self._insert(request, zone))

    @route("POST", INSTANCES + "/bulkInsert", "compute.instances.bulkInsert", query="requestId", target=_asked_name)
    def bulk_insert(self, request: Request, project: str, zone: str) -> Response:
        return self._once(request, lambda: self._bulk_insert(request, zone))

    @route("GET", INSTANCE, "compute.instances.get")
    def get(self, request: Request, project: str, zone: str, instance: str) -> Response:
        self.permit(request, "compute.instances.get", zone, instance)
        return json_response(self.park.find(zone, instance).body)

    @route("GET", INSTANCES, "compute.instances.list", query=None)
    def list(self, request: Request, project: str, zone: str) -> Response:
        if zone in self.unreachable:
            raise ApiError(503, f"The service is currently unavailable in zones/{zone}.", reason="backendError")
        here = sorted((vm.name, vm.body) for vm in self.park.vms.values() if vm.zone == zone)
        return listed(request, "compute#instanceList", [body for _, body in here])

    @route("GET", AGGREGATED, "compute.instances.aggregatedList", query=None)
    def aggregated(self, request: Request, project: str) -> Response:
        pairs = [(f"zones/{vm.zone}", vm.body) for _, vm in sorted(self.park.vms.items())]
        scopes = [f"zones/{zone}" for region in regions() for zone in zones(region)]
        away = [f"zones/{zone}" for zone in self.unreachable]
        return aggregated(request, "compute#instanceAggregatedList", "instances", pairs, scopes, away)

    @route(
        "GET", INSTANCE + "/getGuestAttributes", "compute.instances.getGuestAttributes", query="queryPath variableKey"
    )
    def attributes(self, request: Request, project: str, zone: str, instance: str) -> Response:
        self.permit(request, "compute.instances.getGuestAttributes", zone, instance)
        vm = self.park.find(zone, instance)
        path = request.query.get("queryPath", "") or request.query.get("variableKey", "")
        space, _, key = path.partition("/")
        entries = {at: value for at, value in sorted(vm.guest.items()) if space in ("", at[0]) and key in ("", at[1])}
        if not entries or not enabled(vm):
            text = f"The resource '{path}' of type 'Guest Attribute' was not found."
            raise ApiError(404, text, reason="notFound")
        items = [{"namespace": at, "key": name, "value": value} for (at, name), value in entries.items()]
        link = f"{vm.body['selfLink']}/getGuestAttributes"
        answer = {"kind": "compute#guestAttributes", "queryPath": path, "selfLink": link}
        return json_response({**answer, "queryValue": {"items": items}})

    @route("GET", INSTANCE + "/serialPort", "compute.instances.getSerialPortOutput", query="port start")
    def serial(self, request: Request, project: str, zone: str, instance: str) -> Response:
        said = self.park.find(zone, instance).serial.encode()
        start = min(int(request.query.get("start", 0)), len(said))
        answer = {"kind": "compute#serialPortOutput", "contents": said[start:].decode("utf-8", "replace")}
        return json_response({**answer, "start": str(start), "next": str(len(said))})

    def stop(self, request: Request, vm: Vm) -> Operation:
        """Stop a VM. A stopped VM may be stopped again."""
        request.only_query("requestId", "discardLocalSsd", "noGracefulShutdown")
        if vm.status in MAKING:
            raise self._not_ready(vm)
        if vm.status not in DOWN and vm.scratch and "discardLocalSsd" not in request.query:
            raise ApiError(400, DISCARD, reason="badRequest")
        operation = self._begin("stop", request, vm)
        if vm.status in DOWN:
            self.operations.end(operation)
        else:
            self.life.stop(vm, operation)
        return operation

    def start(self, request: Request, vm: Vm) -> Operation:
        """Start a VM. A running VM may be started again."""
        request.only_query("requestId")
        if vm.status == "STOPPING":
            raise self._not_ready(vm)
        self._within_quotas([vm] if vm.status in DOWN else [])
        operation = self._begin("start", request, vm)
        if vm.status in DOWN:
            self.life.start(vm, operation)
        else:
            self.operations.end(operation)
        return operation

    def delete(self, request: Request, vm: Vm) -> Operation:
        request.only_query("requestId", "noGracefulShutdown")
        if vm.body.get("deletionProtection"):
            raise bad(
                f"Invalid resource usage: 'Resource cannot be deleted if it's protected against deletion. {vm.name}'."
            )
        operation = self._begin("delete", request, vm)
        self.life.delete(vm, operation)
        return operation

    def set_metadata(self, request: Request, vm: Vm) -> Operation:
        """Replace all metadata items, if nobody has changed them since they were read."""
        request.only_query("requestId")
        body = request.json()
        if body.get("fingerprint") != vm.body["metadata"]["fingerprint"]:
            message = "Supplied fingerprint does not match current metadata fingerprint."
            raise ApiError(412, message, reason="conditionNotMet")
        check_metadata([(item["key"], item.get("value", "")) for item in body.get("items", ())], "metadata")
        vm.body["metadata"] = fingerprinted({"kind": "compute#metadata", "items": body.get("items", [])})
        operation = self._begin("setMetadata", request, vm)
        self.operations.end(operation)
        return operation

    def permit(self, request: Request, permission: str, zone: str, name: str) -> None:
        """Raise ApiError 403 if the user lacks a permission."""
        if (self.who(request), permission) in self.denied:
            resource = f"projects/{self.park.project}/zones/{zone}/instances/{name}"
            raise ApiError(403, f"Required '{permission}' permission for '{resource}'", reason="forbidden")

    def _acting(self, name: str, act: Callable[[Request, Vm], Operation]) -> Callable[..., Response]:
        def acted(request: Request, project: str, zone: str, instance: str) -> Response:
            self.permit(request, f"compute.instances.{name}", zone, instance)
            return self._once(request, lambda: act(request, self.park.find(zone, instance)))

        return acted

    def _once(self, request: Request, act: Callable[[], Operation]) -> Response:
        """Perform a request, unless one with the same id was performed before."""
        key, now = request.query.get("requestId", ""), self.park.now()
        said = json.dumps([request.method, request.path, request.body.decode("utf-8", "replace")])
        known = self._requests.get(key)
        if known and now - known[0] < REMEMBERED:
            if known[1] != said:
                text = f"Invalid value for field 'requestId': '{key}'. It was used for a different request."
                raise ApiError(409, text, reason="duplicate")
            return json_response(known[2])
        operation = act()
        if key:
            self._requests[key] = now, said, operation
        return json_response(operation)

    def _insert(self, request: Request, zone: str) -> Operation:
        body = request.json()
        instance = parse_instance(body)
        self.permit(request, "compute.instances.create", zone, instance.name)
        self._check_machine("resource.machineType", instance.machine_type, zone)
        ends = self._end_of_reservation(instance, zone)
        vm = self.park.add(zone, instance.name, body)
        vm.ends = ends
        self._within_quotas([vm])
        operation = self._begin("insert", request, vm)
        self.life.make(vm, operation)
        if self.quotas.late and (problem := self._over([vm])):
            self.life.refuse(vm, problem)
        return operation

    def _bulk_insert(self, request: Request, zone: str) -> Operation:
        body = request.json()
        bulk = parse_bulk(body)
        properties = body["instanceProperties"]
        self._check_machine("resource.instanceProperties.machineType", properties["machineType"], zone)
        ends = self._end_of_reservation(bulk.instance_properties, zone)
        names = sorted(bulk.per_instance_properties) or list(numbered(bulk.name_pattern, bulk.count))
        vms: list[Vm] = []
        for name in names:
            self.permit(request, "compute.instances.create", zone, name)
            try:
                vms.append(self.park.add(zone, name, properties))
            except ApiError:
                self._undo(vms)
                raise
            vms[-1].ends = ends
        self._within_quotas(vms)
        group = f"{len(self.operations.all):08x}-launch-group"
        operation = self.operations.begin(
            "bulkInsert", zone, self.who(request), operationGroupId=group, **_client_id(request)
        )
        each = [self._begin("insert", request, vm, operationGroupId=group) for vm in vms]
        self.life.make_all(vms, operation, each, bulk.min_count or bulk.count)
        return operation

    def _check_machine(self, path: str, machine: str, zone: str) -> None:
        if not is_zone(zone):
            raise invalid("zone", zone, "Unknown zone.")
        if shape(last(machine), zone) is None:
            text = f"Machine type with name '{last(machine)}' does not exist in zone '{zone}'."
            raise invalid(path, machine, text)

    def _end_of_reservation(self, instance: Any, zone: str) -> str:
        """Return when the VM's reservation ends; empty: never, or it has none. Raises ApiError: the VM can't use it.

        https://github.com/skypilot-org/skypilot/issues/9771 has the message about DENSE.
        """
        affinity = instance.reservation_affinity
        if affinity.consume_reservation_type != "SPECIFIC_RESERVATION":
            return ""
        name = last(affinity.values[0])
        if (zone, name) not in self.reservations:
            raise bad(f"Specified reservations [{name}] do not exist.")
        known = self.reservations[zone, name]
        dense = known.get("deploymentType") == "DENSE" or known.get("reservationMode") == "CALENDAR"
        if dense and instance.scheduling.provisioning_model != "RESERVATION_BOUND":
            raise bad("Instances consuming DENSE reservations must use provisioningModel RESERVATION_BOUND.")
        return str(known.get("deleteAtTime", ""))

    def _within_quotas(self, vms: Sequence[Vm]) -> None:
        problem = self._over(vms) if vms and not self.quotas.late else None
        if problem:
            self._undo([vm for vm in vms if vm.status not in DOWN])
            raise ApiError(403, problem.message, reason="quotaExceeded")

    def _over(self, vms: Sequence[Vm]) -> Any:
        there = [vm.wanted for vm in self.park.up() if vm not in vms]
        return self.quotas.exceeded([vm.wanted for vm in vms], there)

    def _undo(self, vms: Sequence[Vm]) -> None:
        for vm in vms:
            self.park.remove(vm)

    def _begin(self, kind: str, request: Request, vm: Vm, **more: str) -> Operation:
        client_id = {} if "operationGroupId" in more else _client_id(request)  # only the bulkInsert has the id
        return self.operations.begin(kind, vm.zone, self.who(request), **target(vm), **client_id, **more)

    def _not_ready(self, vm: Vm) -> ApiError:
        resource = f"projects/{self.park.project}/zones/{vm.zone}/instances/{vm.name}"
        return ApiError(400, f"The resource '{resource}' is not ready", reason="resourceNotReady")


def _client_id(request: Request) -> dict[str, str]:
    """Return a request's id as its operation shows it (Operation.clientOperationId: "the value of requestId")."""
    request_id = request.query.get("requestId")
    return {"clientOperationId": request_id} if request_id else {}


def enabled(vm: Vm) -> bool:
    return vm.items.get("enable-guest-attributes", "").upper() == "TRUE"


class Disks:
    """The disks. They are created with VMs only."""

    def __init__(self, instances: Instances, operations: Operations) -> None:
        self.instances = instances
        self.park = instances.park
        self.operations = operations

    @route("GET", DISK, "compute.disks.get")
    def get(self, request: Request, project: str, zone: str, disk: str) -> Response:
        if (zone, disk) not in self.park.disks:
            raise self.park.gone(zone, "disks", disk)
        return json_response(self.park.disks[zone, disk])

    @route("GET", ZONE + "/disks", "compute.disks.list", query=None)
    def list(self, request: Request, project: str, zone: str) -> Response:
        disks = [disk for (disk_zone, _), disk in self.park.disks.items() if disk_zone == zone]
        return listed(request, "compute#diskList", disks)

    @route("GET", "/compute/v1/projects/{project}/aggregated/disks", "compute.disks.aggregatedList", query=None)
    def all(self, request: Request, project: str) -> Response:
        pairs = [(f"zones/{zone}", disk) for (zone, _), disk in sorted(self.park.disks.items())]
        scopes = [f"zones/{zone}" for region in regions() for zone in zones(region)]
        return aggregated(request, "compute#diskAggregatedList", "disks", pairs, scopes)

    @route("DELETE", DISK, "compute.disks.delete", query="requestId")
    def delete(self, request: Request, project: str, zone: str, disk: str) -> Response:
        body = self.park.disks.get((zone, disk))
        if body is None:
            raise self.park.gone(zone, "disks", disk)
        if users := body.get("users"):
            raise self.park.in_use(zone, disk, users)
        del self.park.disks[zone, disk]
        link = {"targetId": body["id"], "targetLink": body["selfLink"]}
        operation = self.operations.begin("delete", zone, self.instances.who(request), **link)
        self.operations.end(operation)
        return json_response(operation)
