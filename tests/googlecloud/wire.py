"""Requests and answers, as plain data between the HTTP server and the services."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from tests.googlecloud.errors import ApiError


class Recorded(NamedTuple):
    """One request as it arrived. `body` is its parsed JSON; None if it had none or wasn't JSON."""

    method: str
    path: str
    body: Any
    query: Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """`path` is still percent-encoded (an object's name may hold slashes); header names are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises ApiError 400."""
        try:
            value = json.loads(self.body)
        except ValueError as error:
            message = f"Invalid JSON payload received. {error}"
            raise ApiError(400, message) from error
        if not isinstance(value, dict):
            raise ApiError(400, "Invalid JSON payload received. Expected an object at the root.")
        return value

    def only_query(self, *known: str) -> None:
        """Refuse a parameter that isn't played here: ignoring it would make a test pass for the wrong reason."""
        for name in self.query:
            if name not in (*known, "alt", "$alt", "prettyPrint", "key", "quotaUser", "fields", "projection"):
                raise ApiError(400, f"The loopback cloud does not know the query parameter {name!r} here.")


@dataclass(frozen=True)
class Response:
    """An answer."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as an answer in JSON."""
    content = {"Content-Type": "application/json; charset=UTF-8"}
    return Response(json.dumps(value).encode(), status, {**content, **(headers or {})})


class Route(NamedTuple):
    """A method, the whole path as a pattern with named groups, and who answers: called with the groups, unquoted."""

    method: str
    pattern: re.Pattern[str]
    answer: Callable[..., Response]


def route(method: str, path: str, answer: Callable[..., Response]) -> Route:
    """`path` with {names} for its variable parts; a part ends at a slash or a colon."""
    return Route(method, re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/:]+)", path)), answer)


def dispatch(routes: list[Route], request: Request) -> Response | None:
    """The answer of the first route that fits, or None."""
    for method, pattern, answer in routes:
        match = pattern.fullmatch(request.path)
        if match and method == request.method:
            return answer(request, **{name: unquote(part) for name, part in match.groupdict().items()})
    return None


def page(items: list[Any], size: int, token: str) -> tuple[list[Any], str]:
    """One page of `items` and the token of the next ("" at the end). Raises ApiError for a token not from here."""
    start = int(token) if token.isdecimal() else 0 if not token else -1
    if not 0 <= start <= len(items):
        raise ApiError(400, "The page token is invalid.")
    end = start + size
    return items[start:end], str(end) if end < len(items) else ""
