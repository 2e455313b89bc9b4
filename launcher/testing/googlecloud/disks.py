"""Persistent disks, attached to VMs or left behind."""

from __future__ import annotations

from launcher.testing.googlecloud.compute_filters import aggregated, listed
from launcher.testing.googlecloud.compute_operations import ZONE, Operations
from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.instances import Instances
from launcher.testing.googlecloud.shapes import regions, zones
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route

DISK = ZONE + "/disks/{disk}"


class Disks:
    """The disks. They are created with VMs only."""

    def __init__(self, instances: Instances, operations: Operations) -> None:
        self.instances = instances
        self.park = instances.park
        self.operations = operations
        self.routes: list[Route] = [
            route("GET", DISK, self.get, "compute.disks.get"),
            route("GET", ZONE + "/disks", self.list, "compute.disks.list"),
            route("GET", "/compute/v1/projects/{project}/aggregated/disks", self.all, "compute.disks.aggregatedList"),
            route("DELETE", DISK, self.delete, "compute.disks.delete"),
        ]

    def get(self, request: Request, project: str, zone: str, disk: str) -> Response:
        """Return one disk."""
        request.only_query()
        if (zone, disk) not in self.park.disks:
            raise self.park.gone(zone, "disks", disk)
        return json_response(self.park.disks[zone, disk])

    def list(self, request: Request, project: str, zone: str) -> Response:
        """Return a page of the zone's disks."""
        return listed(request, "compute#diskList", [one for (at, _), one in self.park.disks.items() if at == zone])

    def all(self, request: Request, project: str) -> Response:
        """Return a page over all zones."""
        pairs = [(f"zones/{zone}", disk) for (zone, _), disk in sorted(self.park.disks.items())]
        scopes = [f"zones/{zone}" for region in regions() for zone in zones(region)]
        return aggregated(request, "compute#diskAggregatedList", "disks", pairs, scopes)

    def delete(self, request: Request, project: str, zone: str, disk: str) -> Response:
        """Delete a disk that no VM uses."""
        request.only_query("requestId")
        found = self.park.disks.get((zone, disk))
        if found is None:
            raise self.park.gone(zone, "disks", disk)
        if users := found.get("users"):
            where = f"projects/{self.park.project}/zones/{zone}"
            text = f"The disk resource '{where}/disks/{disk}' is already being used by "
            user = f"'{where}/instances/{users[0].rpartition('/')[2]}'"
            raise ApiError(400, text + user, reason="resourceInUseByAnotherResource")
        del self.park.disks[zone, disk]
        link = {"targetId": found["id"], "targetLink": found["selfLink"]}
        operation = self.operations.begin("delete", zone, self.instances.who(request), **link)
        self.operations.end(operation)
        return json_response(operation)
