"""Requests and answers between the HTTP server and the services, refusals in Google's two formats, and routes."""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from launcher.testing.googlecloud.pieces import Pieces, cut, size
from launcher.testing.httpserver import Handler

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


COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Comparisons of Google's list filters, which are alike in all services."""


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
        return {"error": self._with_reason() if self.reason else self._rpc_status()}

    def _with_reason(self) -> dict[str, Any]:
        domain = "usageLimits" if self.reason in ("rateLimitExceeded", "quotaExceeded") else "global"
        entry = {"message": self.message, "domain": domain, "reason": self.reason}
        return {"code": self.code, "message": self.message, "errors": [entry]}

    def _rpc_status(self) -> dict[str, Any]:
        status: dict[str, Any] = {"code": self.code, "message": self.message, "status": self.status}
        if self.violations:
            fields = [{"field": field, "description": message} for field, message in self.violations]
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields}]
        elif self.info:
            what: dict[str, Any] = {"reason": self.info, "domain": "googleapis.com"}
            what |= {"metadata": self.metadata} if self.metadata else {}
            status["details"] = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", **what}]
        return status


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


@dataclass(frozen=True)
class Response:
    """An answer, how much of it is sent, and what happens to the connection."""

    body: bytes | Pieces = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds before anything is sent."""
    head: bool = True
    """True if status and headers are sent."""
    shown: int | None = None
    """How many bytes of the body are sent. None: all. Content-Length always has the full size."""
    then: Literal["next", "close", "reset", "hold"] = "next"
    """The connection afterwards: it accepts the next request, is closed, is reset, or stays open without an answer."""

    @property
    def pieces(self) -> Pieces:
        """Return the body in its buffers."""
        return self.body if isinstance(self.body, tuple) else (self.body,)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return `value` as a JSON answer."""
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


def route(
    method: str, path: str, answer: Callable[..., Response], operation: str, target: Callable[..., Target] | None = None
) -> Route:
    """Return a route for `path` with {names} for its variable parts. A part ends at a slash or a colon."""
    pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/:]+)", path))
    return Route(method, pattern, answer, operation, target or _last_name)


def _last_name(request: Request, **names: str) -> Target:
    return Target(next(reversed(names.values()), ""))


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


def handler(
    serve: Callable[[Request], Response], clock: Callable[[], float] = time.time
) -> type[BaseHTTPRequestHandler]:
    """Return an HTTP handler that passes requests to `serve` and sends the answers. `clock` is for the Date header."""

    class RequestHandler(Handler):
        def answer(self) -> None:
            url = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            query = parameters(url.query)
            response = serve(Request(self.command, url.path, query, headers, self.read_body(headers)))
            stopped = bool(response.wait) and self.server.stopping.wait(response.wait)
            if not stopped:
                self.send(response)
            self.close_connection = self.close_connection or stopped or response.then != "next"
            if response.then == "reset":
                self.server.to_reset.add(self.connection)
            while response.then == "hold" and self.connection.recv(1 << 16):
                continue  # until the client or the server closes the connection

        def send(self, response: Response) -> None:
            if response.head:
                self.send_response(response.status)
                for name, value in response.headers.items():
                    self.send_header(name, value)
                if response.status != 204:
                    self.send_header("Content-Length", str(size(response.pieces)))
                self.end_headers()
            shown = response.pieces if response.shown is None else cut(response.pieces, 0, response.shown)
            for piece in shown if self.command != "HEAD" else ():
                self.wfile.write(piece)
            self.wfile.flush()

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = answer  # noqa: N815 - names that the base class requires

        def date_time_string(self, timestamp: float | None = None) -> str:
            """Return the Date header by the cloud's clock, which may differ from the client's."""
            return super().date_time_string(clock() if timestamp is None else timestamp)

    return RequestHandler


def parameters(query: str) -> dict[str, str]:
    """Return the query's parameters; the values of a repeated one are joined with commas."""
    values: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        values[name] = f"{values[name]},{value}" if name in values else value
    return values
