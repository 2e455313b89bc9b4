"""Compute Engine instances: insert, get, list, and the operations and zones that clients ask for on the way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from typing import Any

from google.cloud import compute_v1

from tests.googlecloud.errors import ApiError
from tests.googlecloud.protobufs import parse
from tests.googlecloud.wire import Request, Response, Route, json_response, page, route

ZONE = "/compute/v1/projects/{project}/zones/{zone}"
INSTANCE = ZONE + "/instances/{instance}"
OPERATION = ZONE + "/operations/{operation}"
GPU_SERIES = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")


def parse_instance(body: dict[str, Any]) -> compute_v1.Instance:
    """The body of instances.insert as Google's type. Raises ApiError as Compute Engine would refuse it."""
    message = parse(body, compute_v1.Instance.pb()(), "resource")
    instance = compute_v1.Instance.wrap(message)
    _check(instance)
    return instance


def _check(instance: compute_v1.Instance) -> None:
    for name in ("name", "machine_type", "disks", "network_interfaces"):
        if not getattr(instance, name):
            camel = {"machine_type": "machineType", "network_interfaces": "networkInterfaces"}.get(name, name)
            raise _invalid(f"Invalid value for field 'resource.{camel}': ''. Required field is missing.")
    machine = instance.machine_type.rpartition("/")[2]
    scheduling = instance.scheduling
    if scheduling.preemptible and scheduling.provisioning_model not in ("", "SPOT"):
        field, value = "resource.scheduling.provisioningModel", scheduling.provisioning_model
        rule = "For preemptible, only allowed provisioning_model value is SPOT"
        raise _invalid(f"Invalid value for field '{field}': '{value}'. {rule}")
    attached = [entry.accelerator_type.rpartition("/")[2] for entry in instance.guest_accelerators]
    if attached and not machine.startswith("n1-"):
        raise _invalid(f"[{attached[0]}, {machine}] features are not compatible for creating instance.")
    if (attached or machine.startswith(GPU_SERIES)) and scheduling.on_host_maintenance != "TERMINATE":
        raise _invalid("Instances with guest accelerators do not support live migration.")


def _invalid(message: str) -> ApiError:
    return ApiError(400, message, reason="invalid")


class Compute:
    """The service. Instances run at once; operations are done when they are answered."""

    def __init__(self, project: str, number: str, clock: Callable[[], float], url: Callable[[], str]) -> None:
        self.project = project
        self.number = number
        self.clock = clock
        self.url = url
        self.instances: dict[tuple[str, str], dict[str, Any]] = {}
        self.operations: dict[tuple[str, str], dict[str, Any]] = {}
        self._ids = count(5_000_000_000_000_000_001)
        self.routes: list[Route] = [
            route("GET", ZONE, self.zone, "compute.zones.get"),
            route("POST", ZONE + "/instances", self.insert, "compute.instances.insert"),
            route("GET", ZONE + "/instances", self.list, "compute.instances.list"),
            route("GET", INSTANCE, self.get, "compute.instances.get"),
            route("GET", OPERATION, self.operation, "compute.zoneOperations.get"),
            route("POST", OPERATION + "/wait", self.operation, "compute.zoneOperations.wait"),
        ]

    def zone(self, request: Request, project: str, zone: str) -> Response:
        """A zone that is up; every zone whose name looks like one exists."""
        self._allow(project)
        region = zone.rpartition("-")[0]
        links = {"selfLink": self._link(zone), "region": f"{self.url()}/compute/v1/projects/{project}/regions/{region}"}
        return json_response({"kind": "compute#zone", "name": zone, "status": "UP", **links})

    def insert(self, request: Request, project: str, zone: str) -> Response:
        """Take an instance, and answer an operation that is done."""
        self._allow(project)
        request.only_query("requestId")
        body = request.json()
        name = parse_instance(body).name
        if (zone, name) in self.instances:
            resource = f"projects/{self.project}/zones/{zone}/instances/{name}"
            raise ApiError(409, f"The resource '{resource}' already exists", reason="alreadyExists")
        self.instances[zone, name] = self._instance(body, zone, name)
        return json_response(self._done(zone, name))

    def get(self, request: Request, project: str, zone: str, instance: str) -> Response:
        """One instance."""
        self._allow(project)
        return json_response(self._known(self.instances, zone, "instances", instance))

    def list(self, request: Request, project: str, zone: str) -> Response:
        """A page of the zone's instances."""
        self._allow(project)
        request.only_query("maxResults", "pageToken", "returnPartialSuccess")
        found = [instance for (place, _), instance in sorted(self.instances.items()) if place == zone]
        items, following = page(found, int(request.query.get("maxResults", 500)), request.query.get("pageToken", ""))
        more = {"nextPageToken": following} if following else {}
        return json_response({"kind": "compute#instanceList", "items": items, **more})

    def operation(self, request: Request, project: str, zone: str, operation: str) -> Response:
        """One operation; waiting for it ends at once."""
        self._allow(project)
        return json_response(self._known(self.operations, zone, "operations", operation))

    def _instance(self, body: dict[str, Any], zone: str, name: str) -> dict[str, Any]:
        links = {"zone": self._link(zone), "selfLink": self._link(zone, "instances", name)}
        given = {"id": str(next(self._ids)), "status": "RUNNING", "creationTimestamp": self._now(), **links}
        return {**body, "kind": "compute#instance", **given}

    def _done(self, zone: str, name: str) -> dict[str, Any]:
        number = str(next(self._ids))
        operation = {
            "kind": "compute#operation",
            "id": number,
            "name": f"operation-{number}",
            "operationType": "insert",
            "status": "DONE",
            "progress": 100,
            "insertTime": self._now(),
            "endTime": self._now(),
            "zone": self._link(zone),
            "targetId": self.instances[zone, name]["id"],
            "targetLink": self._link(zone, "instances", name),
            "selfLink": self._link(zone, "operations", f"operation-{number}"),
        }
        self.operations[zone, f"operation-{number}"] = operation
        return operation

    def _known(self, table: dict[tuple[str, str], dict[str, Any]], zone: str, kind: str, name: str) -> dict[str, Any]:
        if (zone, name) not in table:
            resource = f"projects/{self.project}/zones/{zone}/{kind}/{name}"
            raise ApiError(404, f"The resource '{resource}' was not found", reason="notFound")
        return table[zone, name]

    def _allow(self, project: str) -> None:
        if project not in (self.project, self.number):
            message = f"The resource 'projects/{project}' was not found"
            raise ApiError(404, message, reason="notFound")

    def _link(self, zone: str, kind: str = "", name: str = "") -> str:
        link = f"{self.url()}/compute/v1/projects/{self.project}/zones/{zone}"
        return f"{link}/{kind}/{name}" if kind else link

    def _now(self) -> str:
        return datetime.fromtimestamp(self.clock(), UTC).isoformat(timespec="milliseconds")
