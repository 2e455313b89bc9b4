"""Requests and answers between the HTTP server and the services, refusals in Google's two formats, and routes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote

from launcher.testing.httpserver import Head
from launcher.testing.httpserver import Response as Response  # noqa: PLC0414 - services import it from here

STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""google.rpc.Code by HTTP status (google/rpc/code.proto)."""


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Violation(NamedTuple):
    """An invalid field. `field` is dotted, as Google writes it: job_spec.worker_pool_specs[0]."""

    field: str
    message: str


class ApiError(Exception):
    """A refusal: an HTTP code, Google's message and, for the older JSON APIs, a reason such as ``conditionNotMet``.

    `info` is the reason in the newer APIs' google.rpc.ErrorInfo, such as SERVICE_DISABLED, and `metadata` its metadata.
    """

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        status: str = "",
        info: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.info = info
        self.metadata = dict(metadata or {})
        self.status = status or STATUS.get(code, "UNKNOWN")

    def body(self) -> dict[str, Any]:
        """Return the JSON: google.rpc.Status for the newer APIs, errors[] with a reason for Compute and Storage."""
        if self.reason:
            domain = "usageLimits" if self.reason in ("rateLimitExceeded", "quotaExceeded") else "global"
            entry = {"message": self.message, "domain": domain, "reason": self.reason}
            return {"error": {"code": self.code, "message": self.message, "errors": [entry]}}
        status: dict[str, Any] = {"code": self.code, "message": self.message, "status": self.status}
        if self.violations:
            fields = [{"field": field, "description": message} for field, message in self.violations]
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields}]
        elif self.info:
            what: dict[str, Any] = {"reason": self.info, "domain": "googleapis.com"}
            what |= {"metadata": self.metadata} if self.metadata else {}
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", **what}]
        return {"error": status}


class Recorded(NamedTuple):
    """One recorded request. `body` is its parsed JSON, or None."""

    method: str
    path: str
    body: Any
    query: Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """A request. `path` is still percent-encoded (object names may contain slashes); header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def of(cls, head: Head) -> Request:
        return cls(head.method, head.path, parameters(head.query), head.headers, head.read(None))

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises ApiError 400."""
        try:
            value = json.loads(self.body)
        except ValueError as error:
            message = f"Invalid JSON payload received. {error}"
            raise ApiError(400, message) from error
        if not isinstance(value, dict):
            raise ApiError(400, "Invalid JSON payload received. Expected an object at the root.")
        return value

    def only_query(self, *known: str) -> None:
        """Reject unsupported parameters. Ignoring one could make a test pass for the wrong reason."""
        for name in self.query:
            if name not in (*known, "alt", "$alt", "prettyPrint", "key", "quotaUser", "fields", "projection"):
                raise ApiError(400, f"The loopback cloud does not know the query parameter {name!r} here.")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    content = {"Content-Type": "application/json; charset=UTF-8"}
    return Response(json.dumps(value).encode(), status, {**content, **(headers or {})})


class Target(NamedTuple):
    """The target of a request: a resource's name (for a list: the prefix), and the step of the operation."""

    name: str
    step: str | None = None


class Route(NamedTuple):
    """A method, the path as a pattern with named groups, and the function that answers.

    The function receives the unquoted groups, and so does `target`. `operation` is Google's name for it
    (storage.objects.get).
    """

    method: str
    pattern: re.Pattern[str]
    answer: Callable[..., Response]
    operation: str
    target: Callable[..., Target]


@dataclass(frozen=True)
class Call:
    """A request in Google's terms. `operation` is empty if no route matches."""

    request: Request
    operation: str
    target: Target


Answer = TypeVar("Answer", bound=Callable[..., Response])


def route(
    method: str,
    path: str,
    operation: str,
    *,
    query: str | Sequence[str] | None = "",
    target: Callable[..., Target] | None = None,
) -> Callable[[Answer], Answer]:
    """Mark a service's method as the answer to requests for `path`, which has {names} for its variable parts.

    A part ends at a slash or a colon. `query` names the supported parameters, all others are refused; None: the method
    itself checks them. `target` defaults to the path's last name.
    """
    known = query.split() if isinstance(query, str) else query

    def mark(answer: Answer) -> Answer:
        def checked(service: Any, request: Request, /, **names: str) -> Response:
            if known is not None:
                request.only_query(*known)
            return answer(service, request, **names)

        marked = new_route(method, path, checked, operation, target)
        vars(answer)["routes"] = [*vars(answer).get("routes", ()), marked]
        return answer

    return mark


def new_route(
    method: str, path: str, answer: Callable[..., Response], operation: str, target: Callable[..., Target] | None = None
) -> Route:
    pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/:]+)", path))
    return Route(method, pattern, answer, operation, target or _last_name)


def routes_of(service: Any) -> list[Route]:
    """Return the routes to a service's marked methods, and its `more_routes`."""
    marked = [route for function in vars(type(service)).values() for route in getattr(function, "routes", ())]
    return [*(r._replace(answer=partial(r.answer, service)) for r in marked), *getattr(service, "more_routes", ())]


def _last_name(request: Request, **names: str) -> Target:
    return Target(next(reversed(names.values()), ""), page_step(request))


def page_step(request: Request) -> str | None:
    """Return the step of a list request: "page" for any page but the first."""
    return "page" if request.query.get("pageToken") else None


def find_route(routes: list[Route], request: Request) -> tuple[Route, dict[str, str]] | None:
    """Return the first matching route and the variable parts of its path, or None."""
    for route in routes:
        match = route.pattern.fullmatch(request.path) if route.method == request.method else None
        if match:
            return route, {name: unquote(part) for name, part in match.groupdict().items()}
    return None


def page(items: list[Any], size: int, token: str) -> tuple[list[Any], str]:
    """Return one page of `items` and the token of the next ("" at the end). Raises ApiError: unknown token."""
    start = int(token) if token.isdecimal() else 0 if not token else -1
    if not 0 <= start <= len(items):
        raise ApiError(400, "The page token is invalid.")
    end = start + size
    return items[start:end], str(end) if end < len(items) else ""


def check_project(project: str, *own: str) -> None:
    """Raise ApiError 403 unless the project is the cloud's own, by its id or number."""
    if project not in own:
        raise ApiError(403, "The caller does not have permission")


def parameters(query: str) -> dict[str, str]:
    """Return the query's parameters; the values of a repeated one are joined with commas."""
    values: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        values[name] = f"{values[name]},{value}" if name in values else value
    return values
