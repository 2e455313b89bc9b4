"""Changes of a project's network: firewall rules and routers.

Facts. Seen (gcloud 528's generated client, compute v1): paths and fields. Assumed: an operation is done at once; a name
that exists is refused with 409 and the reason alreadyExists (documented for all of Compute Engine).
"""

from __future__ import annotations

from typing import Any

from google.cloud import compute_v1

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.protobufs import parse
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route
from launcher.testing.googlecloud.zones import GLOBAL, REGION, Zones


class Networks:
    """The requests that change what `Zones` shows."""

    def __init__(self, zones: Zones) -> None:
        self.zones = zones
        self.operations: dict[str, dict[str, Any]] = {}
        firewall, router = GLOBAL + "/firewalls/{name}", REGION + "/routers/{name}"
        self.routes: list[Route] = [
            route("POST", GLOBAL + "/firewalls", self.add_firewall, "compute.firewalls.insert"),
            route("GET", firewall, self.firewall, "compute.firewalls.get"),
            route("POST", REGION + "/routers", self.add_router, "compute.routers.insert"),
            route("GET", router, self.router, "compute.routers.get"),
            route("PATCH", router, self.patch_router, "compute.routers.patch"),
            route("GET", GLOBAL + "/operations/{operation}", self.operation, "compute.globalOperations.get"),
            route("POST", GLOBAL + "/operations/{operation}/wait", self.operation, "compute.globalOperations.wait"),
            route("GET", REGION + "/operations/{operation}", self.operation, "compute.regionOperations.get"),
            route("POST", REGION + "/operations/{operation}/wait", self.operation, "compute.regionOperations.wait"),
        ]

    def add_firewall(self, request: Request, project: str) -> Response:
        """Create a firewall rule."""
        body = request.json()
        parse(body, compute_v1.Firewall.pb()(), "resource")
        if any(one["name"] == body["name"] for one in self.zones.firewalls):
            raise exists(f"global/firewalls/{body['name']}")
        usual = {"direction": "INGRESS", "priority": 1000, "network": self.zones._global("networks", "default")}
        self.zones.firewalls.append({**usual, **body})
        return self._done(f"global/firewalls/{body['name']}", "global")

    def firewall(self, request: Request, project: str, name: str) -> Response:
        """Return a firewall rule."""
        found = next((one for one in self.zones.firewalls if one["name"] == name), None)
        if found is None:
            raise self.zones._gone("global/firewalls", name)
        link = self.zones._global("firewalls", name)
        return json_response({"kind": "compute#firewall", "selfLink": link, **found})

    def add_router(self, request: Request, project: str, region: str) -> Response:
        """Create a router."""
        body = request.json()
        parse(body, compute_v1.Router.pb()(), "resource")
        if (region, body["name"]) in self.zones.routers:
            raise exists(f"regions/{region}/routers/{body['name']}")
        self.zones.routers[region, body["name"]] = body
        return self._done(f"regions/{region}/routers/{body['name']}", f"regions/{region}")

    def router(self, request: Request, project: str, region: str, name: str) -> Response:
        """Return a router."""
        if (region, name) not in self.zones.routers:
            raise self.zones._gone(f"regions/{region}/routers", name)
        link = self.zones._root(f"regions/{region}/routers/{name}")
        return json_response(
            {"kind": "compute#router", "selfLink": link, **self.zones.routers[region, name], "name": name}
        )

    def patch_router(self, request: Request, project: str, region: str, name: str) -> Response:
        """Change a router's fields."""
        self.router(request, project, region, name)
        parse(request.json(), compute_v1.Router.pb()(), "resource")
        self.zones.routers[region, name] |= request.json()
        return self._done(f"regions/{region}/routers/{name}", f"regions/{region}")

    def operation(self, request: Request, project: str, operation: str, region: str = "") -> Response:
        """Return an operation, which is done."""
        return json_response(self.operations[operation])

    def _done(self, target: str, scope: str) -> Response:
        name = f"operation-{len(self.operations) + 1}"
        link = self.zones._root(f"{scope}/operations/{name}")
        done = {"kind": "compute#operation", "name": name, "status": "DONE", "progress": 100, "selfLink": link}
        where = {"region": self.zones._root(scope)} if scope != "global" else {}
        self.operations[name] = {**done, **where, "targetLink": self.zones._root(target), "operationType": "insert"}
        return json_response(self.operations[name])


def exists(what: str) -> ApiError:
    """Return the refusal of a name that exists."""
    return ApiError(409, f"The resource '{what}' already exists", reason="alreadyExists")
