"""Planned faults between a client and the cloud: refusals, and delayed, partial, damaged or missing answers.

    fault = cloud.faults.add(Fault("storage.objects.insert", Status(503), name=r"^runs/", times=2, after=1))
    cloud.faults.down(until=clock() + 180)
    ...
    assert cloud.faults.used[fault] == 2

The first fault that matches a request affects it. Operations have Google's names (storage.objects.insert for all kinds
of upload, storage.objects.get for metadata and bytes). "" matches requests without a route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import ClassVar, Literal, Protocol

from launcher.testing.fault_plan import FaultPlan, PlannedFault
from launcher.testing.googlecloud.wire import ApiError, Call, Request, Response, json_response

Serve = Callable[[Request], Response]
Step = Literal["begin", "chunk", "status", "cancel", "whole", "media", "metadata", "page"]
"""Steps of operations.

storage.objects.insert: a resumable upload's beginning, chunks, status request and cancellation; "whole" is an upload in
one request. storage.objects.get: the bytes, or the metadata. Lists: "page" is any page but the first.
"""


class Effect(Protocol):
    """An effect on a request."""

    step: ClassVar[Step | None] = None
    """The only step that it applies to. None: any."""

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the answer and how much of it is sent. `serve` lets the cloud perform the request."""


REASONS = {
    401: ("authError", "Invalid Credentials"),
    403: ("forbidden", "Forbidden"),
    404: ("notFound", "Not Found"),
    408: ("uploadBrokenConnection", "The request timed out."),
    410: ("gone", "The upload session is no longer available."),
    429: ("rateLimitExceeded", "The rate limit was exceeded. Please reduce your request rate."),
    500: ("internalError", "We encountered an internal error. Please try again."),
    502: ("", "Bad Gateway"),
    503: ("backendError", "We encountered an internal error. Please try again."),
    504: ("", "Gateway Timeout"),
}
"""Reason and text by status. Without a reason the answer is not JSON, as from a proxy in front of the service.

Source: https://cloud.google.com/storage/docs/json_api/v1/status-codes, read in 2026.
"""


NEWER = (
    *("aiplatform.", "artifactregistry.", "cloudbilling.", "cloudbuild.", "cloudresourcemanager."),
    *("logging.", "oslogin.", "secretmanager."),
)
"""Operations of the APIs that return google.rpc.Status."""


@dataclass(frozen=True)
class Status(Effect):
    """A refusal without effect. `retry_after` is in seconds.

    Reason and message default to Google's. `info` is the reason in a newer API's ErrorInfo, and `metadata` its
    metadata.
    """

    code: int
    retry_after: int | None = None
    reason: str = ""
    message: str = ""
    info: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __call__(self, call: Call, serve: Serve) -> Response:
        usual, text = REASONS.get(self.code, ("backendError", "Backend Error"))
        reason, message = self.reason or usual, self.message or text
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if not reason:
            page = f"<html><title>Error {self.code}</title><p>{message}</html>".encode()
            return Response(page, self.code, {"Content-Type": "text/html; charset=UTF-8", **headers})
        newer = call.operation.startswith(NEWER)
        error = ApiError(self.code, message, reason="" if newer else reason, info=self.info, metadata=self.metadata)
        return json_response(error.body(), self.code, headers)


@dataclass(frozen=True)
class Reset(Effect):
    """The connection is reset, before or after the request is performed (a lost answer)."""

    when: Literal["before", "after"] = "before"

    def __call__(self, call: Call, serve: Serve) -> Response:
        if self.when == "after":
            serve(call.request)
        return Response(head=False, shown=0, then="reset")


@dataclass(frozen=True)
class Slow(Effect):
    """The request is performed immediately, and answered `seconds` later."""

    seconds: float

    def __call__(self, call: Call, serve: Serve) -> Response:
        return replace(serve(call.request), wait=self.seconds)


@dataclass(frozen=True)
class Stalled(Effect):
    """The request is performed, but only `sent` bytes of the answer are sent. The connection stays open."""

    sent: Literal["nothing", "head", "half"] = "nothing"

    def __call__(self, call: Call, serve: Serve) -> Response:
        response = serve(call.request)
        shown = len(response.body) // 2 if self.sent == "half" else 0
        return replace(response, head=self.sent != "nothing", shown=shown, then="hold")


@dataclass(frozen=True)
class Truncated(Effect):
    """Only the first `keep` bytes of the body (None: half of it) are sent; Content-Length has the full size."""

    keep: int | None = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        response = serve(call.request)
        shown = len(response.body) // 2 if self.keep is None else self.keep
        return replace(response, shown=shown, then="close")


@dataclass(frozen=True)
class Torn(Effect):
    """`bits` of byte `at` of the body (None: the middle one) are flipped. Length and headers are unchanged.

    With the highest bit, 0x80, ASCII becomes invalid UTF-8.
    """

    at: int | None = None
    bits: int = 1

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the damaged answer. Raises ApiError 400: it has no such byte."""
        response = serve(call.request)
        length = len(response.body)
        at = length // 2 if self.at is None else self.at
        if not 0 <= at < length:
            raise ApiError(400, f"{self} met an answer of {length} bytes ({call.operation} {call.target.name}).")
        body = memoryview(response.body)  # copied once: a client waits for the answer
        wrong = bytes([body[at] ^ self.bits])
        return replace(response, body=b"".join((body[:at], wrong, body[at + 1 :])))


@dataclass(frozen=True)
class Meanwhile(Effect):
    """An action between performing a request and sending its answer, such as another job that is created meanwhile."""

    action: Callable[[], object]

    def __call__(self, call: Call, serve: Serve) -> Response:
        """Return the answer from before the action."""
        response = serve(call.request)
        self.action()
        return response


@dataclass(frozen=True)
class Fault(PlannedFault):
    """`effect` on the requests of `operation` (a glob: storage.*) with a resource name that matches `name` (a regex).

    For lists the name is the requested prefix, for storage.buckets.get the bucket.
    """

    operation: str
    effect: Effect
    name: str = ""
    step: Step | None = None

    def fits(self, call: Call) -> bool:
        steps = {self.step, self.effect.step} - {None}
        named = re.search(self.name, call.target.name) is not None
        return named and fnmatchcase(call.operation, self.operation) and steps <= {call.target.step}


@dataclass(frozen=True)
class Outage:
    """`effect` on every request until a time of the cloud's clock."""

    until: float
    effect: Effect


class Faults(FaultPlan[Fault]):
    """The planned faults and outages."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock = clock
        self._outages: list[Outage] = []

    def down(self, until: float, effect: Effect | None = None) -> Outage:
        """Refuse all requests before `until`, by resetting the connection or with `effect`, such as Status(503)."""
        self._outages.append(outage := Outage(until, effect or Reset()))
        return outage

    def clear(self) -> None:
        """Remove all planned faults and outages. `used` is kept."""
        super().clear()
        self._outages.clear()

    @property
    def planned(self) -> bool:
        return bool(self._faults or self._outages)

    def meet(self, call: Call) -> Effect | None:
        """Return the effect on this request and count it. None: it passes."""
        for outage in self._outages:
            if self.clock() < outage.until:
                with self._lock:
                    self.used[outage] += 1
                return outage.effect
        fault = self.take(lambda fault: fault.fits(call))
        return fault.effect if fault else None
