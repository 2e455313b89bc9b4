"""Planned faults between a client and a registry.

    registry.faults.add(Fault("upload.*", Refuse(503), times=2, after=1))

The first fault that matches a request takes effect. Steps are ping, token, manifest.head, manifest.get, manifest.put,
blob.head, blob.get, mount, upload.begin, upload.chunk, upload.finish, upload.cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from launcher.testing.fault_plan import FaultPlan, PlannedFault
from launcher.testing.httpserver import Response
from launcher.testing.registry.api import Request, error

Serve = Callable[[Request], Response]


class Effect(Protocol):
    """An effect on a request. `serve` lets the registry perform it. `reads`: bytes of the body that are received."""

    @property
    def reads(self) -> int | None: ...

    def __call__(self, request: Request, serve: Serve) -> Response: ...


@dataclass(frozen=True)
class Fault(PlannedFault):
    """`effect` on the requests of a step (a glob)."""

    step: str
    effect: Effect


class Faults(FaultPlan[Fault]):
    """The planned faults."""

    def meet(self, step: str) -> Effect | None:
        """Return the effect on a request of this step; None: the request passes."""
        fault = self.take(lambda fault: fnmatchcase(step, fault.step))
        return fault.effect if fault else None


@dataclass(frozen=True)
class Refuse:
    """The request is refused without effect. `retry_after`: the header's value, in seconds or any text."""

    status: int
    code: str = "UNKNOWN"
    retry_after: int | str | None = None
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return error(self.status, self.code, headers=headers)


@dataclass(frozen=True)
class Reset:
    """The connection is reset before the request is performed."""

    reads: int | None = 0

    def __call__(self, request: Request, serve: Serve) -> Response:
        return Response(head=False, then="reset")


@dataclass(frozen=True)
class LoseResponse:
    """The request is performed, and the connection is reset before the response."""

    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        serve(request)
        return Response(head=False, then="reset")


@dataclass(frozen=True)
class CutOff:
    """The connection is reset within the body: the registry receives its first `reads` bytes."""

    reads: int | None

    def __call__(self, request: Request, serve: Serve) -> Response:
        serve(replace(request, whole=False))
        return Response(head=False, then="reset")


@dataclass(frozen=True)
class Torn:
    """The first byte of a body is corrupted: that of the request, or of the response."""

    of: str = "request"
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        if self.of == "request":
            return serve(replace(request, body=_torn(request.body)))
        response = serve(request)
        return replace(response, body=_torn(response.body))


def _torn(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:] if data else data


@dataclass(frozen=True)
class AlterHeader:
    """The request is performed, and a header of the response has another value."""

    header: str
    value: str
    reads: int | None = None

    def __call__(self, request: Request, serve: Serve) -> Response:
        response = serve(request)
        return replace(response, headers={**response.headers, self.header: self.value})
