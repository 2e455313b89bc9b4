"""Requests and answers, as plain data between the HTTP server and the services."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from launcher.testing.googlecloud.errors import ApiError
from launcher.testing.googlecloud.pieces import Pieces


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
    for found in routes:
        match = found.pattern.fullmatch(request.path) if found.method == request.method else None
        if match:
            return found, {name: unquote(part) for name, part in match.groupdict().items()}
    return None


def page(items: list[Any], size: int, token: str) -> tuple[list[Any], str]:
    """Return one page of `items` and the token of the next ("" at the end). Raises ApiError: unknown token."""
    start = int(token) if token.isdecimal() else 0 if not token else -1
    if not 0 <= start <= len(items):
        raise ApiError(400, "The page token is invalid.")
    end = start + size
    return items[start:end], str(end) if end < len(items) else ""
