"""Requests and answers of a registry, as plain data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple
from urllib.parse import parse_qs


class Recorded(NamedTuple):
    """One request as it arrived: `step` is what it is for, `size` the bytes of its body that were read."""

    step: str
    repository: str
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class Request:
    """Header names are in lower case. `step`, `repository` and `name` (a digest, tag, upload) are the path's parts."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = b""
    step: str = ""
    repository: str = ""
    name: str = ""
    whole: bool = True
    """False: the connection ends behind `body`, before the length that was announced."""

    def parameter(self, name: str) -> str:
        """The first value of a query's parameter; empty when there is none."""
        return parse_qs(self.query).get(name, [""])[0]

    def parameters(self, name: str) -> list[str]:
        """All values of a query's parameter."""
        return parse_qs(self.query).get(name, [])


@dataclass(frozen=True)
class Response:
    """An answer, and what becomes of the connection: `reset` sends nothing of it."""

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
    """https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes"""
    body = {"errors": [{"code": code, "message": message or code.lower().replace("_", " "), "detail": {}}]}
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Response(status, {**kind, **(headers or {})}, json.dumps(body).encode())


def digest(data: bytes) -> str:
    """The digest of bytes, as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
