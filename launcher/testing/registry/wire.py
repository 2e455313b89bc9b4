"""Requests and responses of a registry, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import parse_qs


class Recorded(NamedTuple):
    """One recorded request. `size` is the number of bytes of its body that were read."""

    step: str
    repository: str
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Request:
    """A request; header names are in lower case. `parse_path` sets `step`, `repository` and `name` (a digest, tag or
    upload)."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""
    step: str = ""
    repository: str = ""
    name: str = ""
    whole: bool = True
    """False: the connection ends after `body`, before the announced length."""

    def parameter(self, name: str) -> str:
        """Return the first value of a query parameter; empty if it is missing."""
        return parse_qs(self.query).get(name, [""])[0]

    def parameters(self, name: str) -> list[str]:
        """Return all values of a query parameter."""
        return parse_qs(self.query).get(name, [])


@dataclass(frozen=True)
class Response:
    """A response, and the connection afterwards: `reset` resets it without sending anything."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    then: Literal["next", "reset"] = "next"


class RefusedError(Exception):
    """An error of the distribution API."""

    def __init__(self, status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}")
        self.response = error(status, code, message, headers)


def error(status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response (https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes)."""
    body = {"errors": [{"code": code, "message": message or code.lower().replace("_", " "), "detail": {}}]}
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Response(status, {**kind, **(headers or {})}, json.dumps(body).encode())


def digest(data: bytes) -> str:
    """Return the digest of bytes in the form sha256:HEX."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
