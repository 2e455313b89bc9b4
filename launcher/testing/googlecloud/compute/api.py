"""What all of Compute Engine's resources share: refusals, lists with filters and pages, and zonal operations."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from http import HTTPStatus
from itertools import count
from typing import Any, NamedTuple

from launcher.testing.googlecloud.filters import ORDERS, Test, compiled, field_at
from launcher.testing.googlecloud.wire import ApiError, Request, Response, json_response, page, route, utc

LIST = ("filter", "maxResults", "orderBy", "pageToken", "returnPartialSuccess")
AGGREGATED = (*LIST, "includeAllScopes", "serviceProjectNumber")
MOST = 500

Item = dict[str, Any]


def compare(field: str, sign: str, value: str) -> Test:
    """Return a comparison of a resource's field. A minus sign before the field negates it."""
    path = field.removeprefix("-")

    def test(item: Item) -> bool:
        actual = field_at(item, path)
        text = str(actual).lower() if isinstance(actual, bool) else "" if actual is None else str(actual)
        if sign in ("eq", "ne"):
            return bool(re.fullmatch(value.strip("'"), text)) == (sign == "eq")
        if sign == ":":
            return actual is not None and (value == "*" or value.lower() in text.lower())
        return ORDERS[sign](text, value)

    return (lambda item: not test(item)) if field.startswith("-") else test


def listed(request: Request, kind: str, items: Iterable[Item]) -> Response:
    """Return a page of the items that match the request's filter. Raises ApiError 400."""
    request.only_query(*LIST)
    chosen, following = _page(request, [*filter(compiled(request.query.get("filter", ""), compare), items)])
    shown = {"items": chosen} if chosen else {}
    return json_response({"kind": kind, **shown, **following})


def aggregated(
    request: Request, kind: str, name: str, items: Iterable[tuple[str, Item]], scopes: Collection[str],
    unreachable: Collection[str] = (),
) -> Response:  # fmt: skip
    """Return a page over all `scopes` (zones/Z, regions/R). `items` are pairs of a scope and an item in it.

    Raises ApiError 503 if scopes are unreachable and the client does not accept partial lists.
    """
    request.only_query(*AGGREGATED)
    if unreachable and request.query.get("returnPartialSuccess", "").lower() != "true":
        where = ", ".join(sorted(unreachable))
        raise ApiError(503, f"The service is currently unavailable in {where}.", reason="backendError")
    passes = compiled(request.query.get("filter", ""), compare)
    chosen, following = _page(request, [pair for pair in items if pair[0] not in unreachable and passes(pair[1])])
    by_scope: dict[str, Any] = {scope: _warning("NO_RESULTS_ON_PAGE", scope) for scope in scopes}
    by_scope |= {scope: _warning("UNREACHABLE", scope) for scope in unreachable}
    for scope, item in chosen:
        by_scope[scope] = {name: [*by_scope[scope].get(name, ()), item]}
    more = {"unreachables": sorted(unreachable)} if unreachable else {}
    return json_response({"kind": kind, "items": by_scope, **more, **following})


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, str]]:
    size = min(int(request.query.get("maxResults", MOST)), MOST)
    chosen, following = page(items, size, request.query.get("pageToken", ""))
    return chosen, {"nextPageToken": following} if following else {}


def _warning(code: str, scope: str) -> dict[str, Any]:
    texts = {
        "NO_RESULTS_ON_PAGE": f"There are no results for scope '{scope}' on this page.",
        "UNREACHABLE": f"The scope '{scope}' is not reachable at the moment.",
    }
    return {"warning": {"code": code, "message": texts[code], "data": [{"key": "scope", "value": scope}]}}


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
        details = {"errorDetails": list(self.details)} if self.details else {}
        return {"code": self.code, "message": self.message, **details}


class Timeline:
    """Actions that are due at a time. Nothing runs by itself: `settle` performs the due actions in order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._at: float | None = None

    def now(self) -> float:
        """Return Unix seconds: the time of the current action, else of the clock."""
        return self._clock() if self._at is None else self._at

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now() + seconds, next(self._order), action))

    def settle(self) -> None:
        """Perform all due actions, and those that become due by them."""
        while self._due and self._due[0][0] <= self._clock():
            self._at, _, action = heapq.heappop(self._due)
            try:
                action()
            finally:
                self._at = None


class Operations:
    """All operations, in order. `moment` is how long a wait for one blocks, in real seconds."""

    def __init__(self, project: str, timeline: Timeline, url: Callable[[], str], moment: float) -> None:
        self.project = project
        self.timeline = timeline
        self.url = url
        self.moment = moment
        self.all: list[Operation] = []
        self._numbers = count(7_000_000_000_000_000_001)

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
        if operation["status"] == "DONE":
            return
        operation |= {"status": "DONE", "progress": 100, "endTime": stamp(self.timeline.now())}
        if problems:
            http = HTTPStatus(problems[-1].http)
            operation["error"] = {"errors": [problem.json() for problem in problems]}
            operation |= {"httpErrorStatusCode": int(http), "httpErrorMessage": http.phrase.upper()}

    @route("GET", OPERATION, "compute.zoneOperations.get")
    def get(self, request: Request, project: str, zone: str, operation: str) -> Response:
        for known in self.all:
            if operation in (known["name"], known["id"]) and known["zone"].endswith(f"/{zone}"):
                return json_response(known)
        raise not_found(f"projects/{self.project}/zones/{zone}/operations/{operation}")

    @route("POST", OPERATION + "/wait", "compute.zoneOperations.wait")
    def wait(self, request: Request, project: str, zone: str, operation: str) -> Response:
        response = self.get(request, project, zone, operation)
        done = b'"status": "DONE"' in response.body
        return response if done else Response(response.body, response.status, response.headers, wait=self.moment)

    @route("GET", ZONE + "/operations", "compute.zoneOperations.list", query=None)
    def list(self, request: Request, project: str, zone: str) -> Response:
        here = [operation for operation in self.all if operation["zone"].endswith(f"/{zone}")]
        return listed(request, "compute#operationList", here)


def not_found(resource: str) -> ApiError:
    """Return the refusal of a name that does not exist."""
    return ApiError(404, f"The resource '{resource}' was not found", reason="notFound")


def already_exists(resource: str) -> ApiError:
    return ApiError(409, f"The resource '{resource}' already exists", reason="alreadyExists")


def stamp(now: float) -> str:
    """Format a time as Compute Engine does (RFC 3339)."""
    return utc(now).isoformat(timespec="milliseconds")
