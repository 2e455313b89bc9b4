"""Zonal operations of Compute Engine: the action on a VM, its user, and its outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple

from launcher.testing.googlecloud.clock import Timeline, utc
from launcher.testing.googlecloud.compute.lists import listed
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Route, json_response, route

ZONE = "/compute/v1/projects/{project}/zones/{zone}"
OPERATION = ZONE + "/operations/{operation}"
SYSTEM = "system"
"""The user of operations that Google itself started."""

Operation = dict[str, Any]


class Problem(NamedTuple):
    """Why an operation failed: error.errors[] and httpErrorStatusCode."""

    code: str
    message: str
    http: int = 400
    details: tuple[dict[str, Any], ...] = ()

    def json(self) -> dict[str, Any]:
        """Return it as the API shows it."""
        details = {"errorDetails": list(self.details)} if self.details else {}
        return {"code": self.code, "message": self.message, **details}


class Operations:
    """All operations, in order. `moment` is how long a wait for one blocks, in real seconds."""

    def __init__(self, project: str, timeline: Timeline, url: Callable[[], str], moment: float) -> None:
        self.project = project
        self.timeline = timeline
        self.url = url
        self.moment = moment
        self.all: list[Operation] = []
        self._numbers = count(7_000_000_000_000_000_001)
        self.routes: list[Route] = [
            route("GET", ZONE + "/operations", self.list, "compute.zoneOperations.list"),
            route("GET", OPERATION, self.get, "compute.zoneOperations.get"),
            route("POST", OPERATION + "/wait", self.wait, "compute.zoneOperations.wait"),
        ]

    def begin(self, kind: str, zone: str, user: str, **more: Any) -> Operation:
        """Begin an operation, such as insert, delete or compute.instances.preempted."""
        number = str(next(self._numbers))
        event = "systemevent" if user == SYSTEM else "operation"
        name = f"{event}-{int(self.timeline.now() * 1000)}-{number[-6:]}"
        link = f"{self.url()}/compute/v1/projects/{self.project}/zones/{zone}"
        times = {"insertTime": stamp(self.timeline.now()), "startTime": stamp(self.timeline.now())}
        operation = {
            "kind": "compute#operation",
            "id": number,
            "name": name,
            "operationType": kind,
            "status": "RUNNING",
            "progress": 0,
            "user": user,
            "zone": link,
            "selfLink": f"{link}/operations/{name}",
            **times,
            **more,
        }
        self.all.append(operation)
        return operation

    def end(self, operation: Operation, problems: Sequence[Problem] = ()) -> None:
        """End an operation, successfully or with problems."""
        if operation["status"] == "DONE":
            return
        operation |= {"status": "DONE", "progress": 100, "endTime": stamp(self.timeline.now())}
        if problems:
            http = HTTPStatus(problems[-1].http)
            operation["error"] = {"errors": [problem.json() for problem in problems]}
            operation |= {"httpErrorStatusCode": int(http), "httpErrorMessage": http.phrase.upper()}

    def get(self, request: Request, project: str, zone: str, operation: str) -> Response:
        """Return one operation by name or number."""
        request.only_query()
        for known in self.all:
            if operation in (known["name"], known["id"]) and known["zone"].endswith(f"/{zone}"):
                return json_response(known)
        raise not_found(f"projects/{self.project}/zones/{zone}/operations/{operation}")

    def wait(self, request: Request, project: str, zone: str, operation: str) -> Response:
        """Return the operation after a moment, even if it is not done, as Google does after 2 minutes."""
        response = self.get(request, project, zone, operation)
        done = b'"status": "DONE"' in response.pieces[0]
        return response if done else Response(response.body, response.status, response.headers, wait=self.moment)

    def list(self, request: Request, project: str, zone: str) -> Response:
        """Return a page of the zone's operations."""
        here = [operation for operation in self.all if operation["zone"].endswith(f"/{zone}")]
        return listed(request, "compute#operationList", here)


def not_found(resource: str) -> ApiError:
    """Return the refusal of a name that does not exist."""
    return ApiError(404, f"The resource '{resource}' was not found", reason="notFound")


def already_exists(resource: str) -> ApiError:
    """Return the refusal of a name that exists."""
    return ApiError(409, f"The resource '{resource}' already exists", reason="alreadyExists")


def stamp(now: float) -> str:
    """Format a time as Compute Engine does (RFC 3339)."""
    return utc(now).isoformat(timespec="milliseconds")
