"""Guest attributes and the serial port of VMs, and testIamPermissions."""

from __future__ import annotations

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.instances import INSTANCE, Instances
from launcher.testing.googlecloud.vms import Vm
from launcher.testing.googlecloud.wire import Request, Response, Route, json_response, route


class InstanceReads:
    """Read-only methods of instances."""

    def __init__(self, instances: Instances) -> None:
        self.instances = instances
        self.park = instances.park
        self.routes: list[Route] = [
            route("GET", INSTANCE + "/getGuestAttributes", self.attributes, "compute.instances.getGuestAttributes"),
            route("GET", INSTANCE + "/serialPort", self.serial, "compute.instances.getSerialPortOutput"),
            route("POST", INSTANCE + "/testIamPermissions", self.permissions, "compute.instances.testIamPermissions"),
        ]

    def attributes(self, request: Request, project: str, zone: str, instance: str) -> Response:
        """Return all guest attributes of a namespace ("launch/"), or one ("launch/state")."""
        request.only_query("queryPath", "variableKey")
        self.instances.permit(request, "compute.instances.getGuestAttributes", zone, instance)
        vm = self.park.find(zone, instance)
        path = request.query.get("queryPath", "") or request.query.get("variableKey", "")
        space, _, key = path.partition("/")
        found = {at: value for at, value in sorted(vm.guest.items()) if space in ("", at[0]) and key in ("", at[1])}
        if not found or not enabled(vm):
            text = f"The resource '{path}' of type 'Guest Attribute' was not found."
            raise ApiError(404, text, reason="notFound")
        items = [{"namespace": at, "key": name, "value": value} for (at, name), value in found.items()]
        link = f"{vm.body['selfLink']}/getGuestAttributes"
        answer = {"kind": "compute#guestAttributes", "queryPath": path, "selfLink": link}
        return json_response({**answer, "queryValue": {"items": items}})

    def serial(self, request: Request, project: str, zone: str, instance: str) -> Response:
        """Return the output of port 1 from byte `start` on. `next` is the next position."""
        request.only_query("port", "start")
        said = self.park.find(zone, instance).serial.encode()
        start = min(int(request.query.get("start", 0)), len(said))
        answer = {"kind": "compute#serialPortOutput", "contents": said[start:].decode("utf-8", "replace")}
        return json_response({**answer, "start": str(start), "next": str(len(said))})

    def permissions(self, request: Request, project: str, zone: str, instance: str) -> Response:
        """Return which of the requested permissions the user has."""
        request.only_query()
        self.park.find(zone, instance)
        user, asked = self.instances.who(request), request.json().get("permissions", [])
        had = [permission for permission in asked if (user, permission) not in self.instances.denied]
        return json_response({"kind": "compute#testPermissionsResponse", "permissions": had})


def enabled(vm: Vm) -> bool:
    """Return whether guest attributes are enabled."""
    return vm.items.get("enable-guest-attributes", "").upper() == "TRUE"
